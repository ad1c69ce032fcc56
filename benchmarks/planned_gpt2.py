"""What the planner does with GPT-2 small on one GPU with a budget of 0.6 of its peak.

    python -m benchmarks.planned_gpt2

No GPU is needed, and none is measured: the sizes of saved tensors follow from the shapes
(bf16-mixed, microbatches of 4 x 1,024 tokens, the operations that autocast runs in float32 on CUDA
included), and the layers' times are such that they add up to a step of 156 ms on an H100, with the
parts of each operation in proportion to its bytes and products. Shown is what each plan is
predicted to take, for rates of the link to the host, for what a copy takes from the host, and where
the estimate of the layers before the first step is too slow.
"""

from __future__ import annotations

from typing import Any

from benchmarks.measuring import arguments, print_table, save
from lightning_pipeshift.plan.document.plan import Plan
from lightning_pipeshift.plan.inputs.cluster import Cluster, Device
from lightning_pipeshift.plan.inputs.profile import (
    KindProfile,
    LayerProfile,
    Profile,
    SharedWeights,
)
from lightning_pipeshift.plan.inputs.saved_tensors import BEHIND, FRONT, SavedTensor
from lightning_pipeshift.plan.inputs.topology import Topology
from lightning_pipeshift.runtime.offload.stage_memory import MemoryRequest
from lightning_pipeshift.runtime.planning.make_plan import Settings, make_plan

TOKENS, WIDTH, WORDS, BLOCKS, MICROBATCHES = 4096, 768, 50257, 12, 4
FULL, HALF = 4 * TOKENS * WIDTH, 2 * TOKENS * WIDTH
"""The bytes of a hidden state in float32 and in bfloat16."""
EMBEDDING = 4 * WORDS * WIDTH
BUDGET = 0.6 * 8.15e9
FORWARD_SECONDS, BACKWARD_SECONDS = 0.93e-3, 1.87e-3
"""Of a block."""
HEADER = (
    "plan",
    "ms",
    "peak GB",
    "layers recomputed",
    "copies each way",
    "GB each way",
    "smallest copy, MB",
    "states on the host",
)


def block_tensors(is_first: bool) -> tuple[SavedTensor, ...]:
    """What a block saves: sizes, and the part of its forward that each spares if it is held."""
    sizes: list[tuple[int, float]] = [
        (FULL, 0.0),  # the input
        (HALF, 0.0),  # ln_1's result, for c_attn
        (2 * WIDTH * 3 * WIDTH, 0.0),  # c_attn's weight in bfloat16, as of each product
        (3 * HALF, 0.10),  # queries, keys and values
        (HALF, 0.0),  # attention: draws random numbers
        (2 * WIDTH * WIDTH, 0.0),
        (HALF // 2, 0.0),  # dropout's mask
        (FULL, 0.04),  # the first sum
        (HALF, 0.0),
        (2 * WIDTH * 4 * WIDTH, 0.0),
        (4 * HALF, 0.10),  # c_fc
        (8 * HALF, 0.0),  # gelu: in float32 for pow
        (8 * HALF, 0.06),  # tanh
        (8 * HALF, 0.06),  # 1 + tanh
        (4 * HALF, 0.04),  # half of c_fc
        (4 * HALF, 0.0),  # for c_proj
        (2 * WIDTH * 4 * WIDTH, 0.0),
        (HALF // 2, 0.0),
    ]
    found = [SavedTensor(n, size, spares=part) for n, (size, part) in enumerate(sizes)]
    return (*found, SavedTensor(FRONT, FULL)) if is_first else tuple(found)


def layer(name: str, num_bytes: int, inputs: int, working: int, *saved: SavedTensor) -> Any:
    """A layer with weights of so many bytes, trained by Adam."""
    return LayerProfile(
        name,
        parameter_bytes=num_bytes,
        gradient_bytes=num_bytes,
        optimizer_bytes=2 * num_bytes,
        saved_bytes=sum(tensor.num_bytes for tensor in saved),
        input_bytes=inputs,
        tensors=saved,
        working_bytes=working,
    )


def profile(slower: float = 1.0) -> Profile:
    """The model, ``slower`` times as slow."""
    head = (
        SavedTensor(0, 2 * WORDS * WIDTH),
        SavedTensor(1, HALF),
        SavedTensor(BEHIND, 4 * TOKENS * WORDS),
    )
    blocks = [
        layer(f"h.{n}", 4 * 7_087_872, FULL * (1 + (not n)), 200 << 20, *block_tensors(not n))
        for n in range(BLOCKS)
    ]
    layers = (
        layer("wte", EMBEDDING, 0, FULL + EMBEDDING),
        layer("wpe", 4 * 1024 * WIDTH, 0, FULL),
        *blocks,
        layer("ln_f", 8 * WIDTH, FULL, 0, SavedTensor(0, FULL)),
        layer("lm_head", EMBEDDING, HALF + 4 * TOKENS * WORDS, 6 * TOKENS * WORDS, *head),
    )
    forward = [20e-6, 10e-6, *[FORWARD_SECONDS] * BLOCKS, 40e-6, 1.9e-3]
    backward = [300e-6, 20e-6, *[BACKWARD_SECONDS] * BLOCKS, 80e-6, 2.6e-3]
    times = KindProfile(tuple(slower * s for s in forward), tuple(slower * s for s in backward))
    shared = (SharedWeights((0, len(layers) - 1), 0, EMBEDDING),)
    return Profile(layers, {"gpu": times}, 4.0, MICROBATCHES, shared=shared, step_seconds=3e-3)


def planned(
    model: Profile, budget: float, rate: float, copy: float = 0.0, recompute: Any = "auto"
) -> Plan:
    """The plan for a budget in bytes, a rate to the host, and the seconds that a copy takes."""
    device = Device("here", "gpu", 1.0, int(budget), 0, int(60e9), rate, copy)
    settings = Settings(
        microbatches=MICROBATCHES, memory=MemoryRequest(budget), recompute=recompute
    )
    return make_plan(settings, model, Cluster((device,)), Topology(((0,),)))


def row(name: str, model: Profile, plan: Plan) -> list[Any]:
    """What a plan is predicted to take, and what it does."""
    assert plan.prediction is not None
    moved = [
        tensor.num_bytes
        for swap in plan.swapped(0)
        for tensor in model.layers[swap.layer].tensors
        if not swap.stays and tensor.number in swap.tensors
    ]
    (peak,) = plan.prediction.memory_bytes[0]
    return [
        name,
        1e3 * plan.prediction.step_seconds,
        peak / 1e9,
        sum(map(len, plan.recompute)),
        MICROBATCHES * len(moved),
        MICROBATCHES * sum(moved) / 1e9,
        min(moved, default=0) / 1e6,
        sum(map(len, plan.optimizer_on_host)),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    model = profile()
    rows = [row("all kept", model, planned(model, 1e15, 25e9))]
    rows += [row("all recomputed", model, planned(model, BUDGET, 25e9, recompute="full"))]
    for rate, copy in ((25e9, 0.0), (50e9, 0.0), (25e9, 1e-4), (50e9, 1e-4)):
        name = f"{rate / 1e9:g} GB/s, {1e6 * copy:g} us a copy"
        rows.append(row(name, model, planned(model, BUDGET, rate, copy)))
    slow = profile(4.0)
    rows.append(row("25 GB/s, layers 4 times as slow", slow, planned(slow, BUDGET, 25e9)))
    print_table("GPT-2 small, one GPU, 0.6 of the peak: predictions", HEADER, rows)
    save(options.json, {name: dict(zip(HEADER[1:], each, strict=True)) for name, *each in rows})


if __name__ == "__main__":
    main()
