"""Models whose numbers are made later."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.deferred_init import (
    DeferredInit,
    give_attributes_values,
    is_whole,
)
from lightning_pipeshift.model.parameters.uses import hold


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def built(make: Callable[[], nn.Module], seed: int = 0) -> tuple[Any, DeferredInit]:
    deferred = DeferredInit(seed)
    with deferred.recording():
        module = make()
    return module, deferred


def values_of(module: nn.Module, deferred: DeferredInit) -> dict[str, Tensor]:
    return {
        name: deferred.values(tensor) if tensor.is_meta else tensor.detach()
        for name, tensor in tensors_of(module).items()
    }


# Nothing here is random, so that the values have to be exactly those of a model made at once.
class Exact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filled = nn.Parameter(torch.full((3, 4), 2.0))
        self.computed = nn.Parameter(torch.arange(12.0).view(3, 4) * torch.tensor(0.5) + 1)
        self.part = nn.Parameter(torch.zeros(4, 4))
        with torch.no_grad():
            self.part[1:3, 1:] = 7
            self.part.data.T[0].add_(torch.linspace(0, 1, 4))
        self.from_numpy = nn.Parameter(torch.from_numpy(np.eye(3)) + torch.ones(3, 3))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.part
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.mask = torch.triu(torch.ones(3, 3), 1).tolist()
        self.numbers = torch.arange(4).numpy()
        self.chosen = torch.arange(6)[torch.arange(6) % 2 == 0]
        self.register_buffer("table", torch.arange(5), persistent=False)
        self.register_buffer("halves", torch.ones(4).to(torch.float16).to("cpu"))
        self.like = nn.Parameter(torch.empty(2, 2, device=self.filled.device).fill_(3))
        nn.init.eye_(self.like)
        self.zeros = nn.Parameter(torch.zeros_like(self.filled, device=self.filled.device))
        self.fresh = nn.Parameter(self.filled.new_full((2,), 4.0, device=self.filled.device))
        self.copied = nn.Parameter(self.computed.detach().clone())
        with torch.no_grad():
            self.computed.copy_(torch.ones(3, 4))
        twin: Any = copy.deepcopy(self.table)
        self.register_buffer("twin", twin)
        self.tied_twin = copy.deepcopy(self.tied)


def test_values_are_those_of_a_model_made_at_once() -> None:
    module, deferred = built(Exact)
    assert not is_whole(module)
    made = Exact()
    found = values_of(module, deferred)
    assert found.keys() == tensors_of(made).keys()
    for name, value in tensors_of(made).items():
        assert tensors_of(module)[name].is_meta, name
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert module.tied.weight is module.part
    for name in ("rates", "mask"):
        assert getattr(module, name) == getattr(made, name)
    assert module.numbers.tolist() == made.numbers.tolist()
    assert module.chosen.tolist() == made.chosen.tolist()


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 50)
        self.recurrent = nn.LSTM(30, 40)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
        self.norm = nn.BatchNorm1d(6)
        self.embedding = nn.Embedding(50, 30, padding_idx=0)
        self.loose = nn.Parameter(torch.randn(60, 60) * 0.1)
        self.apply(self._begin)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.loose, std=0.5)

    def _begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "random": Random,
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0)
    ),
    "bert": lambda: BertModel(
        BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64)
    ),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(num_layers=2, d_model=32, d_kv=16, d_ff=64, num_heads=2)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=99,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_values_are_spread_as_the_model_says(name: str) -> None:
    module, deferred = built(MODELS[name])
    found = values_of(module, deferred)
    torch.manual_seed(0)
    made, again = (values_of(MODELS[name](), deferred) for _ in range(2))
    assert found.keys() == made.keys()
    assert any(tensor.is_meta for tensor in tensors_of(module).values())
    for key, value in made.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        if torch.equal(value, again[key]):
            assert torch.equal(found[key], value), f"{key} is not random"
            continue
        # The variance of n numbers is right to about sqrt(2 / n), here that of both.
        ratio = float(found[key].double().var() / value.double().var())
        assert abs(math.log(ratio)) < 6 * 2 / value.numel() ** 0.5, key


def test_a_tensor_has_the_same_values_whichever_others_are_made() -> None:
    module, deferred = built(Random)
    again, other = built(Random)
    forwards = values_of(module, deferred)
    for name, tensor in reversed(tensors_of(again).items()):
        if tensor.is_meta:
            assert torch.equal(other.values(tensor), forwards[name]), name
    different, third = built(Random, seed=1)
    assert not torch.equal(third.values(different.loose), forwards["loose"])


def test_the_global_random_state_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    module, deferred = built(Random)
    values_of(module, deferred)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_memory_is_taken_and_only_what_is_asked_for_is_made() -> None:
    # The weight would be a petabyte.
    module, deferred = built(lambda: nn.Linear(2**24, 2**24))
    assert deferred.values(module.bias).shape == (2**24,)


def test_a_state_dict_can_be_loaded_into_a_model_without_values() -> None:
    torch.manual_seed(3)
    state = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    module, deferred = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with deferred.recording():
        module.load_state_dict(state)
    for name, value in values_of(module, deferred).items():
        assert torch.equal(value, state[name]), name


def test_optimizer_state_can_be_loaded_before_there_are_values() -> None:
    trained = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(trained.parameters())
    trained(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    module, deferred = built(lambda: nn.Linear(3, 4))
    late = torch.optim.Adam(module.parameters())
    with deferred.recording():
        late.load_state_dict(optimizer.state_dict())
    for parameter, source in zip(module.parameters(), trained.parameters(), strict=True):
        for name, value in optimizer.state[source].items():
            found = late.state[parameter][name]
            found = deferred.values(found) if deferred.knows(found) else found
            assert torch.equal(found, value), name


def test_a_promise_is_kept_when_it_is_needed_and_not_before() -> None:
    loaded: list[str] = []

    def load(name: str) -> Tensor:
        loaded.append(name)
        return torch.full((3, 4), 5.0)

    module, deferred = built(lambda: nn.Linear(4, 3))
    promised = deferred.promise(torch.empty(3, 4, device="meta"), lambda: load("weight"))
    with deferred.recording():
        module.load_state_dict({"weight": promised, "bias": torch.zeros(3)})
    assert loaded == []
    deferred.values(module.bias)
    assert loaded == []
    assert deferred.values(module.weight).tolist() == [[5.0] * 4] * 3
    assert loaded == ["weight"]
    # Where a tensor has values already, they are loaded at once, and so are those of copies.
    assert copy.deepcopy({"a": promised})["a"].tolist() == [[5.0] * 4] * 3
    assert pickle.loads(pickle.dumps(promised)).tolist() == [[5.0] * 4] * 3
    with deferred.recording():
        assert copy.deepcopy(promised).sum().item() == 60.0
    with deferred.recording():
        nn.Linear(4, 3).load_state_dict({"weight": promised, "bias": torch.zeros(3)})
        ready = nn.Parameter(torch.from_numpy(np.zeros((3, 4), dtype=np.float32)))
        with torch.no_grad():
            ready.copy_(promised)
    assert ready.tolist() == [[5.0] * 4] * 3


def test_a_precision_that_converts_the_module_is_part_of_it() -> None:
    module, deferred = built(lambda: nn.Linear(4, 3))
    before = deferred.values(module.weight)
    with deferred.recording():
        module.to(torch.bfloat16)
    assert torch.equal(deferred.values(module.weight), before.to(torch.bfloat16))


def test_attributes_that_belong_to_no_stage_get_their_values_at_once() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(4)
            self.tables = {"a": [torch.ones(2)]}

    module, deferred = built(Keeps)
    assert module.table.is_meta
    give_attributes_values(module, deferred)
    assert module.table.tolist() == [0, 1, 2, 3]
    assert module.tables["a"][0].tolist() == [1, 1]


def test_the_object_stays_the_same_when_it_gets_its_values() -> None:
    module, deferred = built(lambda: nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    weight = module.weight
    with torch.no_grad():
        hold(weight, deferred.values(weight))
    assert module.weight is weight is optimizer.param_groups[0]["params"][0]
    assert not weight.is_meta


def test_what_nobody_knows_is_an_error() -> None:
    deferred = DeferredInit()
    with pytest.raises(LayerError, match=r"shape \(3,\) is on the meta device, and it"):
        deferred.values(torch.empty(3, device="meta"))


def test_a_source_that_was_changed_is_an_error() -> None:
    source = torch.from_numpy(np.ones(3, dtype=np.float32))
    module, deferred = built(lambda: nn.Linear(1, 3))
    with deferred.recording(), torch.no_grad():
        module.bias.copy_(source)
    source.add_(1)
    with pytest.raises(LayerError, match="was changed in place afterwards"):
        deferred.values(module.bias)


def test_a_parameter_takes_the_memory_of_what_was_loaded_for_it() -> None:
    deferred = DeferredInit()
    loaded = {name: torch.randn(3, 2) for name in ("alone", "twice")}
    with deferred.recording():
        alone, twice, other = (torch.empty(3, 2) for _ in range(3))
        promised = {
            name: deferred.promise(x, lambda x=x: x)  # type: ignore[misc]
            for name, x in loaded.items()
        }
        alone.copy_(promised["alone"])
        twice.copy_(promised["twice"])
        other.copy_(promised["twice"]).add_(promised["twice"])
        twice.add_(other)
    assert deferred.values(alone).data_ptr() == loaded["alone"].data_ptr()
    before = loaded["twice"].clone()
    assert torch.equal(deferred.values(twice), before * 3)
    assert torch.equal(deferred.values(other), before * 2)
    assert torch.equal(loaded["twice"], before)


def _resident_bytes(path: Path) -> int:
    """Of the mappings of a file in this process."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", text)
    return sum(map(int, found)) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="mapped pages are released on Linux only")
def test_a_mapped_tensor_leaves_memory_behind_its_use(tmp_path: Path) -> None:
    path, size = tmp_path / "weights", 1 << 20
    path.write_bytes(np.arange(size, dtype=np.float32).tobytes())
    mapped = torch.from_numpy(np.memmap(path, np.float32, "c"))
    deferred = DeferredInit()
    with deferred.recording():
        weight = torch.empty(size)
        weight.copy_(mapped)
    assert torch.equal(deferred.values(weight), torch.arange(size, dtype=torch.float32))
    assert _resident_bytes(path) > 3 * size
    deferred.lend(mapped)
    assert torch.equal(deferred.values(weight), torch.arange(size, dtype=torch.float32))
    assert _resident_bytes(path) < size
