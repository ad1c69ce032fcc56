import dataclasses
import json
import os
from typing import Any

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.cost.prediction import Prediction
from lightning_pipeshift.plan.cost.simulator import Costs
from lightning_pipeshift.plan.document.plan import LayerRecord, Plan
from lightning_pipeshift.plan.inputs.placement import Placement
from lightning_pipeshift.plan.inputs.saved_tensors import Swap

LAYERS = (
    LayerRecord("wte", 4000, 0.5, 100),
    LayerRecord("h.0", 1000, 1.0, 200),
    LayerRecord("h.1", 1000, 1.0, 300),
    LayerRecord("head", 4000, 0.5, 400),
)


def plan(**changes):
    values: dict[str, Any] = {
        "layers": LAYERS,
        "placement": Placement(((2, 2), (1, 3))),
        "schedule": "1f1b",
        "microbatches": 4,
    }
    return Plan(**(values | changes))


def edited(**changes):
    """The plan's document after somebody edited it."""
    return json.dumps(json.loads(plan().to_json()) | changes)


def test_a_plan_is_a_value():
    assert plan() == plan()
    assert len({plan(), plan(), plan(microbatches=5)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().microbatches = 5


def test_what_it_says_of_the_stages():
    assert plan().stage_forward_seconds(0) == (1.5, 1.5)
    assert plan().stage_forward_seconds(1) == (0.5, 2.5)
    assert plan().stage_parameter_bytes(1) == (4000, 6000)
    assert plan().stage_payload_bytes(0) == (200,)
    assert [[r.name for r in stage] for stage in plan().stage_layers(1)] == [
        ["wte"],
        ["h.0", "h.1", "head"],
    ]
    drained = plan(placement=Placement(((0, 2, 0, 2),)))
    assert drained.stage_payload_bytes(0) == (0, 200, 200)


def test_timeline():
    assert plan().timeline().step_seconds == (4 + 2 - 1) * (1.5 + 3.0)
    assert plan().timeline(vm=1).step_seconds > plan().timeline(vm=0).step_seconds
    assert plan().timeline().peak_in_flight == (2, 1)


def test_with_placement():
    moved = plan().with_placement(Placement(((3, 1),)))
    assert moved.placement.counts == ((3, 1),)
    assert moved.layers == plan().layers
    with pytest.raises(PlanError, match="'placement' places 3 layers, and 'layers' lists 4"):
        plan().with_placement(Placement(((3, 0),)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": LAYERS[:3]}, "'placement' places 4 layers, and 'layers' lists 3"),
        ({"layers": LAYERS[:3] + LAYERS[:1]}, "'layers' lists 'wte' more than once"),
        ({"schedule": "zigzag"}, "'schedule': unknown schedule 'zigzag'.*'gpipe', '1f1b'"),
        ({"microbatches": 0}, "'microbatches' is 0; it must be 1 to 10000"),
        ({"schedule": "async", "microbatches": 2}, "'microbatches' is 2; it must be 1, as an asy"),
        (
            {
                "schedule": "async",
                "microbatches": 1,
                "placement": Placement(((2, 2), (4,))),
            },
            r"schedule='async' with virtual machines \(.*\) of 2, 1 stages",
        ),
    ],
)
def test_invariants(changes, words):
    with pytest.raises(PlanError, match=words):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "empty name"),
        ({"parameter_bytes": -1}, "layer 'wte': field 'parameter_bytes' is -1"),
        ({"forward_seconds": float("nan")}, "layer 'wte': field 'forward_seconds' is nan"),
        ({"payload_bytes": -5}, "layer 'wte': field 'payload_bytes' is -5"),
    ],
)
def test_invariants_of_a_layer(changes, words):
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(LAYERS[0], **changes)


def test_json_and_back():
    assert Plan.from_json(plan().to_json()) == plan()
    assert "step_samples" not in plan().to_json(), "as in files of before, which are read"
    known = plan(step_samples=64)
    assert Plan.from_json(known.to_json()) == known != plan()
    odd = plan(layers=(LayerRecord('a "quoted" ß', 0, 1 / 3, 0),), placement=Placement(((1,),)))
    assert Plan.from_json(odd.to_json()) == odd


def predicted() -> Plan:
    costs = Costs((0.25, 1.5), (0.5, 2.0), (1 / 3,), (0.0,))
    prediction = Prediction((costs,), 2 / 3, 0.0, ((123456.0, 7.0),))
    return plan(placement=Placement(((2, 2),)), prediction=prediction)


def test_a_prediction_is_rounded_and_has_a_line_for_each_figure():
    text = predicted().to_json()
    lines = [line.strip() for line in text.splitlines()]
    assert '"step_seconds": 0.6667,' in lines
    assert '"memory_bytes": [[123500, 7]],' in lines
    read = Plan.from_json(text)
    assert read.prediction is not None
    assert read.prediction.costs[0].payload_seconds == (0.3333,)
    assert read == Plan.from_json(read.to_json()), "rounded once"


@pytest.mark.parametrize(
    "changes", [{"microbatches": 6}, {"placement": [[1, 3]]}, {"schedule": "gpipe"}]
)
def test_an_edited_plan_has_no_prediction(changes, caplog):
    document = json.loads(predicted().to_json()) | changes
    read = Plan.from_json(json.dumps(document))
    assert read.prediction is None
    assert "was edited" in caplog.text
    assert Plan.from_json(json.dumps(dict(reversed(document.items())))) == read


def test_a_document_has_a_layer_per_line():
    lines = plan().to_json().splitlines()
    assert lines[:6] == [
        "{",
        '  "version": 1,',
        '  "placement": [[2, 2], [1, 3]],',
        '  "schedule": "1f1b",',
        '  "microbatches": 4,',
        '  "layers": [',
    ]
    assert [json.loads(line.rstrip(",")) for line in lines[6:-2]] == [
        dataclasses.asdict(layer) for layer in LAYERS
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON document"),
        (plan().to_json()[:-20], "not a JSON document"),
        ("[]", r"the plan is \[\]; it must be an object"),
        ("{}", "field 'version' is null; this PipeShift reads version 1"),
        (edited(version=99), "'version' is 99; this PipeShift reads version 1"),
        (edited(version=99, other=1), "'version' is 99"),
        (edited(colour="red"), "unknown field 'colour'"),
        (edited(microbatches=0), "'microbatches' is 0"),
        (edited(microbatches="4"), "'microbatches' is \"4\"; it must be a whole number"),
        (edited(schedule="zigzag"), "'schedule': unknown schedule 'zigzag'"),
        (edited(schedule=["1f1b"]), "'schedule' is .*a text"),
        (edited(placement=[[2, 3]]), "'placement' places 5 layers, and 'layers' lists 4"),
        (edited(placement=[[2, 2], [5, -1]]), r"virtual machine 1 \(.*\) places -1"),
        (edited(placement=[2, 2]), r"placement: field 'counts\[0\]' is 2; it must be a list"),
        (edited(placement=[]), "a placement of no virtual machine"),
        (edited(layers={}), "'layers' is {}; it must be a list"),
        (edited(layers=[7]), r"layers\[0\] is 7; it must be an object"),
        (edited(layers=[{"name": "wte"}]), r"layers\[0\] has no field 'parameter_bytes'"),
        (
            edited(layers=[dataclasses.asdict(LAYERS[0]) | {"forward_seconds": -1}]),
            "layer 'wte': field 'forward_seconds' is -1",
        ),
    ],
)
def test_a_damaged_document_is_told_by_its_field(text, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(text)


def test_save_and_load(tmp_path):
    path = tmp_path / "made" / "plan.json"
    plan().save(path)
    plan(microbatches=5).save(str(path))
    assert Plan.load(path) == plan(microbatches=5)
    assert os.listdir(path.parent) == ["plan.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plan().save(path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        plan(microbatches=5).save(path)
    assert Plan.load(path) == plan()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_load_names_the_file(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json.*cannot be read"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(PlanError, match=r"bad\.json: the plan: field 'version' is null"):
        Plan.load(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"binary\.json.*cannot be read"):
        Plan.load(tmp_path / "binary.json")


def test_a_plan_for_this_model():
    plan().require_layers(["wte", "h.0", "h.1", "head"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["wte", "h.0", "h.1", "h.2", "head"],
            "missing in the plan 'h.2'; unexpected in the plan none",
        ),
        (["wte", "h.0", "head"], "missing in the plan none; unexpected in the plan 'h.1'"),
        (["emb", "h.0", "h.1", "head"], "missing in the plan 'emb'; unexpected in the plan 'wte'"),
        (["wte", "h.1", "h.0", "head"], "another order: layer 1 is 'h.0' in the plan, 'h.1' in"),
        ([f"block.{i}" for i in range(30)], "'block.7' and 22 more; unexpected in the plan 'wte'"),
    ],
)
def test_a_plan_for_another_model(names, words):
    with pytest.raises(PlanError, match=words):
        plan().require_layers(names)


def test_a_layer_called_twice_is_no_silent_match():
    with pytest.raises(PlanError):
        plan().require_layers(["wte", "h.0", "h.1", "h.1", "head"])


SWAPS = (
    (Swap(0, (0, 2)), Swap(1, (0,), (1,)), Swap(1, (1,)), Swap(2, (4, 3), (0,))),
    (Swap(3, (0,), (0,), (2.5,)),),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"swaps": SWAPS},
        {"swaps": ((), SWAPS[1])},
        {"swaps": SWAPS, "recompute": ((3,), (0, 1, 2))},
        {
            "placement": Placement(((2, 1, 1),)),
            "swaps": ((Swap(0, (0,), (2, 1), (1 / 3, 0.1)), Swap(3, (7,), (0, 1))),),
        },
    ],
)
def test_swaps_to_json_and_back(changes):
    assert Plan.from_json(plan(**changes).to_json()) == plan(**changes)


def test_a_document_says_of_swaps_what_there_is_to_say():
    document = json.loads(plan(swaps=SWAPS).to_json())
    assert document["swaps"] == [
        [
            {"layer": 0, "tensors": [0, 2]},
            {"layer": 1, "tensors": [0], "stages": [1]},
            {"layer": 1, "tensors": [1]},
            {"layer": 2, "tensors": [4, 3], "stages": [0]},
        ],
        [{"layer": 3, "tensors": [0], "stages": [0], "shares": [2.5]}],
    ]
    assert "swaps" not in json.loads(plan().to_json())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"swaps": SWAPS[:1]},
            "'swaps' has entries for 1 virtual machines.*, and 'placement' has 2",
        ),
        (
            {"swaps": ((), (Swap(4, (0,)),))},
            r"'swaps' of virtual machine 1 \(.*\) has tensors \[0\] of layer 4: .* layers 0 to 3",
        ),
        ({"swaps": ((Swap(-1, (0,)),), ())}, "of layer -1: there are the layers 0 to 3"),
        (
            {"swaps": ((Swap(2, (1, 0), stays=True),), ()), "recompute": ((1,), ())},
            r"virtual machine 0 \(.*\) has tensors \[1, 0\] of layer 2: .* not recomputed",
        ),
        (
            {"swaps": ((Swap(2, (0, 1)), Swap(2, (3, 1), (0,))), ())},
            r"tensors \[3, 1\] of layer 2 on stages \[0\]: a tensor has one target",
        ),
        (
            {"swaps": ((Swap(0, (0,), (1, 2)),), ())},
            r"tensors \[0\] of layer 0 on stages \[1, 2\]: there are the stages 0 to 1",
        ),
    ],
)
def test_invariants_of_swaps(changes, words):
    with pytest.raises(PlanError, match=words):
        plan(**changes)


def test_a_layer_that_one_virtual_machine_recomputes_is_swapped_by_another():
    both = plan(swaps=((Swap(2, (0,)),), ()), recompute=((), (2,)))
    assert (both.swapped(0), both.recomputed(1)) == ((Swap(2, (0,)),), {2})
    # The same number in another layer is another tensor.
    assert plan(swaps=((Swap(1, (0,)), Swap(2, (0,))), ())).swapped(0)


@pytest.mark.parametrize(
    ("swaps", "words"),
    [
        (7, "'swaps' is 7; it must be a list"),
        ([[], {}], r"'swaps\[1\]' is \{\}; it must be a list"),
        ([[7], []], r"swaps\[0\]\[0\] is 7; it must be an object"),
        ([[], [{"layer": 0}]], r"swaps\[1\]\[0\] has no field 'tensors'"),
        (
            [[{"layer": 0, "tensors": [0], "to": 1}], []],
            r"swaps\[0\]\[0\] has an unknown field 'to'",
        ),
        ([[{"layer": 0.5, "tensors": [0]}], []], "'layer' is 0.5; it must be a whole number"),
        (
            [[{"layer": 0, "tensors": [True]}], []],
            r"'tensors\[0\]' is true; it must be a whole number",
        ),
        ([[{"layer": 0, "tensors": []}], []], r"a swap of the tensors \[\] of layer 0"),
        (
            [[{"layer": 0, "tensors": [0], "stages": ["1"]}], []],
            r"swaps\[0\]\[0\]: field 'stages\[0\]' is \"1\"; it must be a whole number",
        ),
        (
            [[{"layer": 0, "tensors": [0], "stages": [1], "shares": ["1"]}], []],
            r"'shares\[0\]' is .1.; it must be a number",
        ),
        (
            [[{"layer": 0, "tensors": [0], "shares": [1]}], []],
            r"layer 0 to 0 stages with the shares \[1.0\]",
        ),
        ([[{"layer": 9, "tensors": [0]}], []], "of layer 9: there are the layers 0 to 3"),
        ([[]], "'swaps' has entries for 1 virtual machines"),
    ],
)
def test_damaged_swaps_are_told_by_their_field(swaps, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(edited(swaps=swaps))


def test_no_stage_lends_to_itself():
    """Layers 1 and 2 change their stage; what was to go there stays with them."""
    swaps = (
        Swap(0, (0,), (1,)),
        Swap(1, (0,), (1,)),
        Swap(1, (1,), (2,)),
        Swap(1, (2,), (1, 2)),
        Swap(1, (3,)),
        Swap(2, (0,), (0,)),
    )
    before = plan(placement=Placement(((2, 1, 1),)), swaps=(swaps,))
    assert before.swapped(0) == swaps
    after = before.with_placement(Placement(((1, 1, 2),)))
    assert after.swapped(0) == (swaps[0], swaps[2], swaps[4], swaps[5])
    first = before.with_placement(Placement(((3, 0, 1),)))
    assert first.swapped(0) == swaps[:-1]
    # It is not forgotten: who moves back lends again, in this run or the next.
    assert Plan.from_json(after.to_json()).with_placement(before.placement) == before
    assert plan().swapped(0) == plan().swapped(1) == ()


def test_plans_of_other_swaps_are_not_alike():
    assert plan(swaps=SWAPS).is_like(plan(swaps=SWAPS, microbatches=2))
    assert not plan(swaps=SWAPS).is_like(plan())
    assert len({plan(swaps=SWAPS), plan(), plan(swaps=SWAPS)}) == 2
