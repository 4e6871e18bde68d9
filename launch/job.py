"""The whole job, from options to the last record, in the order in which it happens."""

from __future__ import annotations

import signal
import time
from contextlib import closing

import torch
from torch import nn

import aotdist
from aotdist.errors import BadSettings
from aotdist.launch.checkpoints.manifest import CHECKPOINTS_FOLDER, TextFacts
from aotdist.launch.checkpoints.resume import resume
from aotdist.launch.checkpoints.saver import Saver
from aotdist.launch.checkpoints.snapshot import NEVER, TrainState
from aotdist.launch.config import JobOptions
from aotdist.launch.data import ByteStream, Corpus, Windows, load_corpus
from aotdist.launch.loggers import RecordingReporter, make_loggers, require_loggers
from aotdist.launch.loop import Trainer
from aotdist.launch.metrics import METRICS_FILE, EndRecord, cut_metrics
from aotdist.launch.model import Decoder, build_decoder, num_parameters
from aotdist.launch.optim import build_optimizer
from aotdist.launch.parallel import Place, World, distribute, join
from aotdist.launch.profiling import PROFILE_FOLDER, StepProfiler, require_gpu_for_snapshots
from aotdist.launch.progress import Reporter, make_reporter
from aotdist.launch.resuming import batch_ranks, describe_ranks, earlier_run, with_same_batch
from aotdist.launch.run_folder import RunFolder, claim_run_folder, write_config
from aotdist.launch.run_lock import RunLock, unwritable
from aotdist.launch.shutdown import Interrupted, StopRequest, naming_lost_ranks


def run_job(
    asked: JobOptions, place: Place, stop: StopRequest, lock: RunLock, *, sets_batch: bool = False
) -> None:
    """Trains as the options say; leaves the process group, if any, to the caller.

    Args:
        asked: the options. A run that is resumed on other ranks keeps the sequences of a step, so the batch
            of a rank may differ from these.
        lock: not yet taken; released by the caller.
        sets_batch: whether the command sets the batch for the present ranks, see `command_sets_batch`.

    Raises:
        BadSettings: the options do not fit the machine, the ranks or the text.
        RunInUse: another process trains in the folder of the run.
        TrainingDiverged: the loss is no longer finite.
        Interrupted: a signal requested an early end, and the state was saved.
    """
    started = time.perf_counter()
    torch.manual_seed(asked.run.seed)
    torch.use_deterministic_algorithms(asked.run.deterministic)
    require_loggers(asked)
    world = join(asked.parallel, place)
    before = world.from_rank_0(lambda: earlier_run(asked, place))
    num_dp_ranks = world.layout.num_dp_ranks
    meant_for = batch_ranks(asked, before, num_dp_ranks, sets_batch=sets_batch)
    options = with_same_batch(asked, meant_for, num_dp_ranks)
    require_gpu_for_snapshots(options.profile, world.device)
    corpus = load_corpus(options.data)
    model = build_decoder(options.model, seq_len=options.data.seq_len, seed=options.run.seed)
    facts = _facts(options, world, corpus, model)
    _convert(model, options)
    distribute(model, world, options)
    aotdist.compile(model, backend=options.compile.backend)
    state = TrainState(model, build_optimizer(model, options.optim), _training_stream(options, world, corpus))
    text = _text_facts(options, world, corpus)
    run = world.from_rank_0(lambda: claim_run_folder(options, place, lock))
    checkpoints = run.path / CHECKPOINTS_FOLDER
    resumed = None if run.is_new else resume(state, checkpoints, world, text)
    if resumed is not None:
        facts["going on"] = str(resumed) + _left_out(options, resumed.step)
    if before is not None:
        facts["going on"] += describe_ranks(before, place.world_size, options, num_dp_ranks)
    saver = Saver(checkpoints, options.checkpoint, world, text, NEVER if resumed is None else resumed.step)
    with (
        closing(_reporter(asked, world, run, facts, state, meant_for)) as reporter,
        naming_lost_ranks(),
        saver,
    ):
        held_out = Windows(corpus.validation, options.data.seq_len)
        profiler = StepProfiler(options.profile, run.path / PROFILE_FOLDER, place.rank)
        with closing(profiler):
            finished = Trainer(options, world, held_out, stop, reporter, saver, profiler).run(state)
        status = "finished" if finished else "stopped"
        reporter.record(EndRecord(status, state.step, time.perf_counter() - started))
    if not finished:
        raise Interrupted(stop.signal_number or signal.SIGINT)


def _convert(model: Decoder, options: JobOptions) -> None:
    """Converts the linear layers of the blocks in place, to 8 bits, or 2:4 sparse, before they are sharded.

    Raises:
        BadSettings: a recipe's package is missing, or the sizes do not fit.
    """
    float8, sparse24 = options.float8, options.sparse24
    if sparse24.mask != "off":
        aotdist.sparsify_24(model, _in_a_block, mask=sparse24.mask, decay=sparse24.decay)
    if float8.recipe != "off":
        aotdist.to_float8(model, float8.recipe, filter=_in_a_block, float8_all_gather=float8.all_gather)


def _in_a_block(path: str, _: nn.Linear) -> bool:
    return path.startswith("blocks.")


def _left_out(options: JobOptions, step: int) -> str:
    """A note about steps that are not trained or profiled, since the run is past them; mostly empty."""
    steps, profile = options.optim.steps, options.profile
    if step >= steps:
        return f"; --optim.steps {steps} was reached already: nothing is left to train"
    if profile.steps and step >= profile.first_step + profile.steps - 1:
        return f"; the steps to profile, from {profile.first_step}, are over: nothing is profiled"
    return ""


def _text_facts(options: JobOptions, world: World, corpus: Corpus) -> TextFacts:
    """What identifies the text, and the meaning of a position in it.

    Raises:
        BadSettings: on every rank, if they read different texts.
    """
    hashes = world.gather(corpus.sha256)
    for rank, found in enumerate(hashes):
        if found != hashes[0]:
            what = f"rank {rank} reads another text than rank 0, below {corpus.root} of its own machine"
            raise BadSettings(what, fix="give all machines the same files: --data.root")
    return TextFacts(seq_len=options.data.seq_len, seed=options.run.seed, sha256=corpus.sha256)


def _training_stream(options: JobOptions, world: World, corpus: Corpus) -> ByteStream:
    return ByteStream(
        Windows(corpus.training, options.data.seq_len),
        batch_size=options.data.batch_size,
        rank=world.dp_rank,
        num_ranks=world.layout.num_dp_ranks,
        seed=options.run.seed,
    )


def _reporter(
    options: JobOptions,
    world: World,
    run: RunFolder,
    facts: dict[str, str],
    state: TrainState,
    batch_ranks: int,
) -> Reporter:
    if world.place.rank != 0:
        return Reporter()
    try:
        if not run.is_new:
            cut_metrics(run.path / METRICS_FILE, state.step, state.validated)
        write_config(run.path, options, world, batch_ranks)
        reporter = RecordingReporter(
            run.path, [make_reporter(), *make_loggers(options, run.path, state.step)]
        )
    except OSError as error:
        raise unwritable(run.path, error) from error
    reporter.start({**facts, "run folder": str(run.path)}, options.optim.steps)
    return reporter


def _facts(options: JobOptions, world: World, corpus: Corpus, model: Decoder) -> dict[str, str]:
    """What is printed before the first step."""
    shape = options.model
    head = "tied" if shape.tie_head else "untied"
    dtype = str(world.compute_dtype).removeprefix("torch.")
    megabytes = len(corpus.training) / 1e6, len(corpus.validation) / 1e6
    return {
        "model": f"{num_parameters(model):,} parameters: {shape.num_layers} layers x {shape.dim}, "
        f"{shape.num_heads} heads on {shape.num_kv_heads} key/value heads, {head} head",
        "text": f"{corpus.num_files} files of {corpus.root}: "
        f"{megabytes[0]:.1f} MB to train on, {megabytes[1]:.1f} MB held out",
        "2:4 weights": options.sparse24.mask,
        "ranks": f"{world.layout} on {world.device.type}, {dtype}",
        "compiler": options.compile.backend,
        "float8": options.float8.recipe,
    }
