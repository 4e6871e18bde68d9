"""A report of a model that nobody had to compile: as many nodes as one asks for."""

from aotdist.report.details import Details, KernelDetails, TensorFacts, compare_ranks
from aotdist.report.nodes import CollectiveDetails, GraphDetails, GraphNode, Saved
from aotdist.report.summary import format_bytes

NODES_OF_LAYER = 20
"""Ten in forward, and ten in backward that belong to them."""
HOSTILE = "</script><script>document.title = 'broken out'</script><!--"


def big_report(num_nodes: int) -> Details:
    """A training program of layers of `NODES_OF_LAYER` nodes each."""
    layers = num_nodes // NODES_OF_LAYER
    nodes = [
        node(layer, step, phase, layers)
        for phase in ("forward", "backward")
        for layer in range(layers)
        for step in range(NODES_OF_LAYER // 2)
    ]
    forward = nodes[: len(nodes) // 2]
    saved = [one for one in nodes if one.is_saved]
    told = {"0": "f32[8, 64]", "1": "f32[7, 64]"}
    return Details(
        name=HOSTILE,
        kind="training",
        backend="triton",
        seconds={"trace": 12.5, "partition": 3.0, "codegen": 40.0},
        passes=(),
        inputs=tuple(
            TensorFacts(f"layers.{layer}.weight", "f32[64, 64]", ("gets a gradient",))
            for layer in range(layers)
        ),
        outputs=(TensorFacts("out[0]", "f32[]", ("a tensor of its own",)),),
        graphs=(
            GraphDetails("joint", tuple(nodes), len(nodes)),
            GraphDetails("forward", tuple(forward), len(forward), "def forward(args): ..."),
        ),
        saved=tuple(Saved(one.name, one.name, one.type, one.bytes, one.module, "") for one in saved),
        collectives=tuple(
            CollectiveDetails(
                "forward", "all_gather_into_tensor", "fsdp (2 ranks)", 1 << 20, f"layers.{layer}",
                f"forward_{layer}_0", 9, (f"forward_{layer}_2",),
            )
            for layer in range(layers)
        ),
        kernels=(KernelDetails("forward", "kernel_0", ("mul", "add"), 4096, f"def kernel_0(): {HOSTILE}"),),
        wrapper="def call(args, kwargs): ...",
        facts=(
            ("saved for backward", format_bytes(sum(one.bytes for one in saved))),
            ("traced once for equal blocks", f"`layers.0` for {layers - 2} more {HOSTILE}"),
        ),
        ranks=compare_ranks({int(rank): {"input args[0]": text} for rank, text in told.items()} | {2: None}),
    )  # fmt: skip


def node(layer: int, step: int, phase: str, layers: int) -> GraphNode:
    """One node, which reads the two before it.

    The first two of a layer start a collective and wait for it, the last is saved.
    """
    half = NODES_OF_LAYER // 2
    sequence = layer * half + step
    position = sequence + (layers * half if phase == "backward" else 0)
    kind = {0: "collective", 1: "wait"}.get(step, "call") if phase == "forward" else "call"
    return GraphNode(
        name=f"{phase}_{layer}_{step}",
        operator="aten.mm.default" if step % 2 else "aten.add.Tensor",
        type="f32[64, 64]",
        bytes=64 * 64 * 4,
        phase=phase,
        kind=kind,
        module=f"layers.{layer}.{'attention' if step < 5 else 'mlp'}",
        source=f"model.py:{step}   x = x @ self.weight",
        sequence=sequence,
        reads=tuple(range(max(0, position - 2), position)),
        results=(),
        is_saved=phase == "forward" and step == half - 1,
    )
