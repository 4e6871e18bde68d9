"""The text is the same everywhere, and no byte of it is where it should not be."""

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aotdist import BadSettings
from aotdist.launch import job
from aotdist.launch.config import DataOptions, JobOptions
from aotdist.launch.data import (
    ByteStream,
    Windows,
    is_held_out,
    load_corpus,
    source_files,
    validation_batches,
)

SEQ_LEN = 8
NUM_WINDOWS = 50


@pytest.fixture
def windows():
    """Windows whose bytes tell their number: window n starts with byte n."""
    text = torch.arange(NUM_WINDOWS).repeat_interleave(SEQ_LEN)
    return Windows(torch.cat([text, torch.tensor([0])]).to(torch.uint8), SEQ_LEN)


@pytest.fixture
def options(text):
    return DataOptions(root=text, seq_len=32, validation_percent=20)


def stream(windows, *, rank=0, num_ranks=1, batch_size=4, seed=0, position=0):
    return ByteStream(
        windows, batch_size=batch_size, rank=rank, num_ranks=num_ranks, seed=seed, position=position
    )


def take(stream, count):
    """The numbers of the windows in the next batches."""
    return [batch.tokens[:, 0].tolist() for batch in itertools.islice(stream, count)]


def test_files_come_in_one_order_and_only_the_librarys_own(tmp_path):
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "a.py", "a/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert source_files(tmp_path) == [Path("a.py"), Path("a/z.py"), Path("b.py")]


def test_whole_files_are_held_out(options, text):
    corpus = load_corpus(options)
    for held_out, joined in ((False, corpus.training), (True, corpus.validation)):
        files = [path for path in source_files(text) if is_held_out(path, 20) == held_out]
        assert files
        assert bytes(joined.tolist()) == b"".join((text / path).read_bytes() + b"\0" for path in files)


def test_adding_a_file_moves_no_other():
    assert [is_held_out(Path(f"{n}.py"), 5) for n in range(200)].count(True) in range(3, 20)
    assert is_held_out(Path("x.py"), 100)
    assert not is_held_out(Path("x.py"), 0)


def test_a_text_is_known_by_its_bytes_and_not_by_its_length(text, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(text, root)
    options = DataOptions(root=root, seq_len=32, validation_percent=20)
    first = load_corpus(options)
    for path in source_files(root)[0], next(p for p in source_files(root) if is_held_out(p, 20)):
        (root / path).write_bytes((root / path).read_bytes().replace(b"+", b"-"))
        second = load_corpus(options)
        assert (len(second.training), len(second.validation)) == (len(first.training), len(first.validation))
        assert second.sha256 != first.sha256
        first = second
    assert load_corpus(options).sha256 == first.sha256


def test_a_text_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadSettings, match="the text cannot be read: .*gone.py"):
        load_corpus(DataOptions(root=tmp_path))


def test_ranks_that_read_different_texts_are_told(options):
    corpus, world = load_corpus(options), SimpleNamespace(gather=lambda value: [value, value, "another"])
    with pytest.raises(BadSettings, match="rank 2 reads another text than rank 0"):
        job._text_facts(JobOptions(data=options), world, corpus)


def test_the_standard_library_is_the_default_text():
    corpus = load_corpus(DataOptions())
    assert corpus.root == Path(os.__file__).parent
    assert len(corpus.training) > 10 * len(corpus.validation) > 1_000_000
    assert int(corpus.training.max()) > 127  # not only ASCII
    assert int((corpus.training == 0).sum() + (corpus.validation == 0).sum()) == corpus.num_files


def test_too_little_text_is_an_error(tmp_path):
    with pytest.raises(BadSettings, match="--data.root"):
        load_corpus(DataOptions(root=tmp_path))


def test_targets_are_the_bytes_that_follow(windows):
    batch = windows.batch(torch.tensor([3, 4]))
    text = windows.text.long()
    assert torch.equal(batch.tokens[0], text[24:32])
    assert torch.equal(batch.targets[0], text[25:33])
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_windows_cover_the_text_to_its_end(windows):
    assert len(windows) == NUM_WINDOWS
    assert windows.batch(torch.tensor([NUM_WINDOWS - 1])).targets[0, -1] == windows.text[-1]


def test_ranks_never_read_the_same_window(windows):
    read = [itertools.chain(*take(stream(windows, rank=rank, num_ranks=3), 4)) for rank in range(3)]
    numbers = list(itertools.chain(*read))
    assert len(numbers) == len(set(numbers)) == 48


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order(windows):
    numbers = list(itertools.chain(*take(stream(windows, batch_size=10), 10)))
    first, second = numbers[:NUM_WINDOWS], numbers[NUM_WINDOWS:]
    assert sorted(first) == sorted(second) == list(range(NUM_WINDOWS))
    assert first != second


def test_the_order_follows_the_seed(windows):
    assert take(stream(windows, seed=1), 5) == take(stream(windows, seed=1), 5)
    assert take(stream(windows, seed=1), 5) != take(stream(windows, seed=2), 5)


def test_a_stream_resumes_at_its_position(windows):
    whole = stream(windows)
    take(whole, 7)
    assert take(stream(windows, position=whole.position), 9) == take(whole, 9)


def test_any_number_of_ranks_reads_the_same_global_batch(windows):
    alone = take(stream(windows, batch_size=8), 6)
    ranks = [take(stream(windows, rank=rank, num_ranks=4, batch_size=2), 6) for rank in range(4)]
    assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == alone


def test_validation_reads_the_same_spread_of_windows_every_time(windows):
    def numbers(rank):
        batches = validation_batches(windows, num_batches=3, batch_size=4, rank=rank, num_ranks=2)
        return [number for batch in batches for number in batch.tokens[:, 0].tolist()]

    assert numbers(0) == numbers(0)
    both = sorted(numbers(0) + numbers(1))
    assert len(set(both)) == 24
    assert (both[0], both[-1]) == (0, 47)


def test_a_short_validation_text_is_repeated(windows):
    batches = list(validation_batches(windows, num_batches=20, batch_size=4, rank=1, num_ranks=2))
    assert len(batches) == 20
    assert all(batch.tokens.shape == (4, SEQ_LEN) for batch in batches)
