import dataclasses
import json
import os
from typing import Any

import pytest

from lightning_pipeshift.errors import PlanError
from lightning_pipeshift.plan.placement import Placement
from lightning_pipeshift.plan.plan import LayerRecord, Plan

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
        ({"microbatches": 0}, "'microbatches' is 0; it must be 1 or more"),
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
    odd = plan(layers=(LayerRecord('a "quoted" ß', 0, 1 / 3, 0),), placement=Placement(((1,),)))
    assert Plan.from_json(odd.to_json()) == odd


def test_a_document_has_a_layer_per_line():
    lines = plan().to_json().splitlines()
    assert lines[:6] == [
        "{",
        '  "version": 1,',
        '  "schedule": "1f1b",',
        '  "microbatches": 4,',
        '  "placement": [[2, 2], [1, 3]],',
        '  "layers": [',
    ]
    assert [json.loads(line.rstrip(",")) for line in lines[6:-2]] == [
        dataclasses.asdict(layer) for layer in LAYERS
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON document"),
        (plan().to_json()[:-20], "no JSON document"),
        ("[]", r"the plan is \[\]; it must be an object"),
        ("{}", "the plan has no field 'version'"),
        (edited(version=99), "'version' is 99; this PipeShift reads version 1"),
        (edited(version=99, other=1), "'version' is 99"),
        (edited(colour="red"), "unknown field 'colour'"),
        (edited(microbatches=0), "'microbatches' is 0"),
        (edited(microbatches="4"), "'microbatches' is \"4\"; it must be a whole number"),
        (edited(schedule="zigzag"), "'schedule': unknown schedule 'zigzag'"),
        (edited(schedule=["1f1b"]), "'schedule' is .*a text"),
        (edited(placement=[[2, 3]]), "'placement' places 5 layers, and 'layers' lists 4"),
        (edited(placement=[[2, 2], [5, -1]]), "'placement': virtual machine 1 places -1"),
        (edited(placement=[2, 2]), "'placement' is .*a list of lists of whole numbers"),
        (edited(placement=[]), "'placement': a placement of no virtual machine"),
        (edited(layers={}), "'layers' is {}; it must be a list"),
        (edited(layers=[7]), "layer 0 is 7; it must be an object with name"),
        (edited(layers=[{"name": "wte"}]), "layer 0 has no field 'parameter_bytes'"),
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
    with pytest.raises(PlanError, match=r"bad\.json: the plan has no field"):
        Plan.load(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"binary\.json.*cannot be read"):
        Plan.load(tmp_path / "binary.json")


def test_a_plan_for_this_model():
    plan().require_layers(["wte", "h.0", "h.1", "head"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["wte", "h.0", "h.1", "h.2", "head"], "missing in it 'h.2'; unexpected in it none"),
        (["wte", "h.0", "head"], "missing in it none; unexpected in it 'h.1'"),
        (["emb", "h.0", "h.1", "head"], "missing in it 'emb'; unexpected in it 'wte'"),
        (["wte", "h.1", "h.0", "head"], "another order: layer 1 is 'h.0' in the plan, 'h.1' in"),
        ([f"block.{i}" for i in range(30)], "'block.7' and 22 more; unexpected in it 'wte'"),
    ],
)
def test_a_plan_for_another_model(names, words):
    with pytest.raises(PlanError, match=words):
        plan().require_layers(names)


def test_a_layer_called_twice_is_no_silent_match():
    with pytest.raises(PlanError):
        plan().require_layers(["wte", "h.0", "h.1", "h.1", "head"])
