"""The bookkeeping of `make models`: cells outlive their file, and a page says what failed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.zoo.page import page
from benchmarks.zoo.record import Cells
from benchmarks.zoo.vocabulary import Compiler, Found, Outcome

EAGER = Outcome(seconds=(2.0, 4.0), eager_seconds=(2.0, 4.0), peak=10.0)
SAME = Found(
    0,
    15,
    {
        "eager": EAGER,
        "aotdist": Outcome(seconds=(1.0, 2.0), eager_seconds=(2.0, 4.0), num_graphs=1, peak=9.0),
    },
)
OTHERS: dict[Compiler, Outcome] = {
    "aotdist": Outcome(
        differs=1e-6,
        where="loss, step 1",
        loss_differs=3e-7,
        seconds=(1.0, 3.0),
        eager_seconds=(2.0, 4.0),
        peak=5.0,
    ),
    "torch.compile": Outcome(failure="InternalTorchDynamoError: no"),
}
CELLS = (
    Cells()
    .with_found(("operators", "FSDP2", "Llama", "bf16"), SAME)
    .with_found(("operators", "FSDP2", "Llama", "fp8"), Found(14, 15, {"eager": EAGER, **OTHERS}))
    .with_found(("inductor", "FSDP2", "Llama", "bf16"), Found(0, 15, {"eager": EAGER, **OTHERS}))
    .with_found(
        ("operators", "TP", "T5", "2:4"), Found(0, 0, {"eager": Outcome(failure="RuntimeError: mixed")})
    )
)


def test_cells_outlive_their_file(tmp_path: Path) -> None:
    CELLS.save(tmp_path)
    assert Cells.load(tmp_path) == CELLS
    assert Cells.load(tmp_path / "nowhere") == Cells()


def test_a_cell_is_filled_anew() -> None:
    place = CELLS.cells[0].place
    again = CELLS.with_found(place, Found(1, 1))
    assert len(again.cells) == len(CELLS.cells) and again.at(*place) == Found(1, 1)


def test_the_page_shows_ratios_and_reasons() -> None:
    text = page(CELLS)
    assert "| Llama | bf16 |  | same bits | 0.50 | 0.90 |" in text
    assert "| Llama | fp8 | 14 of 15 | 1e-06: `loss, step 1` | 0.62 | 0.50 | fails | - | - | - |" in text
    assert "- Llama fp8: `torch.compile`: InternalTorchDynamoError: no" in text
    assert "- T5 2:4: `eager`: RuntimeError: mixed" in text
    assert "| FSDP2 | Llama | 10.0 MiB | 9.0 MiB | 1.00 | 0.56 | - | - |" in text
    assert '`make models ARGS="--layouts FSDP2 --families Llama --precisions bf16"`' in text
    assert "| FSDP2 | Llama | bf16 | 3e-07 | 0.62 | fails | - |" in text
    assert "- Llama bf16: `torch.compile`: InternalTorchDynamoError: no" in text
    assert "| Llama | not run | = 0.50 | ~ 0.62 |" in text
