"""What a page says of real programs."""

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.report.details import Details, comparable_facts, compare_ranks, details_of
from aotdist.report.explain import embedded
from aotdist.report.summary import format_bytes
from tests.report.big_report import HOSTILE


def details(target: Any, *args: Any) -> Details:
    compiled = aotdist.compile(target, backend="fx")
    compiled(*args)
    (artifact,) = compiled_call(compiled).artifacts
    return details_of(artifact)


def facts(tensors: Any) -> dict[str, tuple[str, ...]]:
    return {one.name: one.facts for one in tensors}


@pytest.fixture(scope="module")
def normed() -> Details:
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    return details(norm, torch.randn(3, 4))


def test_inputs_are_told_in_words(normed: Details) -> None:
    told = facts(normed.inputs)
    assert told["args[0]"] == ("only read",)
    assert told["1.weight"] == ("gets a gradient",)
    assert told["0.num_batches_tracked"] == ("written in forward, copied back after the graph",)
    assert "written in forward" in told["0.running_mean"][0]
    assert {one.name: one.type for one in normed.inputs}["args[0]"] == "f32[3, 4]"
    assert facts(normed.outputs) == {"out[0]": ("a tensor of its own", "takes a gradient")}


def test_nodes_know_their_module_their_line_and_their_partner(normed: Details) -> None:
    joint = normed.graphs[0].nodes
    product = next(node for node in joint if node.operator == "aten.mm.default" and node.phase == "forward")
    assert product.module == "1"
    assert Path(__file__).name in product.source
    partners = [n for n in joint if n.sequence == product.sequence and n.phase == "backward"]
    assert {node.module for node in partners} == {"1"}
    assert "output `out[0]`" in product.results
    assert any("gradient of `1.weight`" in node.results for node in joint)


def test_a_backward_within_the_program_has_partners_too() -> None:
    """As that of a whole training step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), [model[0].weight])[0]

    nodes = {node.operator: node for node in details(step, torch.randn(2, 4)).graphs[0].nodes}
    forward, backward = nodes["aten.sigmoid.default"], nodes["aten.sigmoid_backward.default"]
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert forward.sequence == backward.sequence is not None
    assert forward.module == backward.module != ""


def test_what_is_saved_adds_up(normed: Details) -> None:
    kept = [one for one in normed.saved if not one.note]
    assert dict(normed.facts)["saved for backward"] == format_bytes(sum(one.bytes for one in kept)) != "0 B"
    saved = {node.name for node in normed.graphs[0].nodes if node.is_saved}
    assert saved == {one.node for one in kept}
    assert normed.saved[-1].note == "an input: nothing more is kept"


def test_what_aliases_is_told_in_words() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, again: torch.Tensor) -> tuple[Any, ...]:
        y.mul_(2)
        made = x + 1
        return x, x[0].t(), made.view(-1), made, made, 3

    x, y = torch.randn(2, 3, 4), torch.randn(3)
    told = details(program, x, y, x)
    assert facts(told.inputs) == {
        "args[0]": ("only read", "the same tensor as `args[2]`"),
        "args[1]": ("written in forward, copied back after the graph",),
    }
    outputs = facts(told.outputs)
    assert outputs["out[0]"] == ("is `args[0]`, the same object",)
    assert outputs["out[1]"] == ("a view of `args[0]`, made again outside: select, t",)
    assert outputs["out[4]"] == ("is `out[3]`, the same object",)
    assert outputs["out[5]"] == ("the same at every call: 3",)


def test_writes_of_what_a_tensor_is_are_told_in_words() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x.mul_(w)

    told = facts(details(program, torch.randn(2, 3), torch.randn(3, 2, requires_grad=True)).inputs)
    assert "`t_` is repeated on it" in told["args[0]"]
    assert (
        "written in forward, copied back outside of the graph, where its gradient passes" in told["args[0]"]
    )


@pytest.mark.parametrize("page", [True, "", 3])
def test_a_page_without_a_name_is_refused(page: Any) -> None:
    model = aotdist.compile(torch.nn.Linear(2, 2), backend="fx")
    with pytest.raises(aotdist.BadSettings, match="`html` is"):
        aotdist.explain(model, html=page)


class Data(html.parser.HTMLParser):
    """The text of the element with the id `data`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self._inside = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data if self._inside else ""


def test_explain_writes_one_page_that_needs_no_other(tmp_path: Path) -> None:
    model = aotdist.compile(torch.nn.Linear(2, 2), backend="fx")
    model(torch.randn(3, 2))
    report = model.explain(html=tmp_path / "report.html")  # type: ignore[operator]
    assert "Linear" in str(report)
    page = (tmp_path / "report.html").read_text()
    assert "http:" not in page and "https:" not in page and "src=" not in page and "@import" not in page
    (program,) = json.loads(Data(page).text)
    assert program["name"] == "Linear" and program["graphs"][0]["name"] == "joint"
    assert "class Node(Function)" in program["wrapper"]
    assert [graph["name"] for graph in program["graphs"] if graph["source"]] == ["forward", "backward"]


def test_a_page_says_what_the_text_says(tmp_path: Path) -> None:
    blocks = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8))) for _ in range(4)]
    layers = nn.Sequential(*blocks)

    @aotdist.compile(backend="fx", settings=aotdist.Settings(unsupported="eager"))
    def program(x: torch.Tensor, *, leaves: bool = False) -> torch.Tensor:
        return layers(x) if not leaves else x + float(x.sum().tolist())

    program(torch.randn(3, 4))
    with pytest.warns(UserWarning, match="run as they were written"):
        program(torch.randn(3, 4), leaves=True)
    text = str(aotdist.explain(program, html=tmp_path / "report.html"))
    (shown,) = json.loads(Data((tmp_path / "report.html").read_text()).text)
    said = dict(shown["facts"])
    assert said["traced once for equal blocks"] == "`layers.1` for 1 more"
    assert all(f"{name}: {value}" in text for name, value in shown["facts"])
    assert "run as they were written" in said


def test_text_of_programs_cannot_end_the_script() -> None:
    text = embedded({"name": HOSTILE})
    assert "<" not in text
    assert json.loads(text) == {"name": HOSTILE}


def test_ranks_are_compared_name_by_name(normed: Details) -> None:
    mine = comparable_facts(normed)
    other = {**mine, "input args[0]": "f32[2, 4] (only read)"}
    found = compare_ranks({0: mine, 1: other, 2: None, 3: mine})
    assert (found.others, found.missing) == ((1, 3), (2,))
    mine, others = mine["input args[0]"], other["input args[0]"]
    assert found.differences == {"input args[0]": {0: mine, 1: others, 3: mine}}


def test_every_report_counts_alike(tmp_path: Path) -> None:
    model = aotdist.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), backend="fx")
    model(torch.ones(2, 4))
    text = str(model.explain(html=tmp_path / "report.html"))
    (program,) = programs_on(tmp_path / "report.html")
    for graph in program["graphs"]:
        assert f"  {graph['name']:<10}{graph['num_operations']:>7} operations\n" in text
        called = [node for node in graph["nodes"] if node["kind"] != "input"]
        assert graph["num_operations"] == len(called)


def test_a_page_opens_on_the_training_program_used_last(tmp_path: Path) -> None:
    model = aotdist.compile(nn.Linear(4, 4), backend="fx", dynamic=False)
    for rows in (2, 3):
        model(torch.ones(rows, 4))
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.explain(html=tmp_path / "report.html")
    shown = [(one["kind"], one["inputs"][0]["type"]) for one in programs_on(tmp_path / "report.html")]
    assert shown == [("training", "f32[3, 4]"), ("training", "f32[2, 4]"), ("inference", "f32[2, 4]")]


def programs_on(page: Path) -> list[dict[str, Any]]:
    data = re.search(r'id="data">(.*)</script>', page.read_text())
    assert data
    return json.loads(data[1])


def test_a_report_is_printed_as_text() -> None:
    norm = aotdist.compile(torch.nn.BatchNorm1d(3), backend="fx")
    assert str(aotdist.explain(norm)) == "nothing compiled yet: call it once"
    norm(torch.randn(4, 3)).sum().backward()
    report = aotdist.explain(norm)
    assert repr(report) == str(report)
    for part in ("BatchNorm1d · training · fx", "joint", "backward", "trace", "total", "running_mean"):
        assert part in str(report)
