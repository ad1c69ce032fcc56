from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_pipeshift.errors import LayerError
from lightning_pipeshift.model.parameters.layers import compiled_around, find_layers, require_layers


class Holder(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def linear():
    return nn.Linear(2, 2)


def names(root, at_least=1):
    return list(find_layers(root, at_least))


def test_the_elements_of_a_sequential_that_have_parameters():
    net = nn.Sequential(linear(), nn.ReLU(), nn.BatchNorm1d(2), nn.Dropout(), linear())
    assert names(Holder(net=net)) == ["net.0", "net.2", "net.4"]


def test_attributes_of_the_root_itself():
    root = Holder(encoder=linear(), loss=nn.CrossEntropyLoss(), head=linear())
    assert names(root) == ["encoder", "head"]
    assert find_layers(root)["head"] is root.head


def test_containers_within_containers():
    net = nn.Sequential(
        nn.Sequential(linear(), nn.ReLU()),
        nn.ModuleDict({"left": linear(), "right": nn.ModuleList([linear(), linear()])}),
    )
    assert names(Holder(net=net)) == ["net.0.0", "net.1.left", "net.1.right.0", "net.1.right.1"]


def test_a_list_of_blocks_deep_inside_wrappers():
    block = lambda: Holder(attention=linear(), mlp=nn.Sequential(linear(), nn.ReLU(), linear()))  # noqa: E731
    body = Holder(embed=nn.Embedding(3, 2), blocks=nn.ModuleList(block() for _ in range(3)))
    net = Holder(body=Holder(body=body, norm=nn.LayerNorm(2)), head=linear())
    assert names(Holder(net=net)) == [
        "net.body.body.embed",
        "net.body.body.blocks.0",
        "net.body.body.blocks.1",
        "net.body.body.blocks.2",
        "net.body.norm",
        "net.head",
    ]


def test_a_list_of_blocks_is_not_opened_further():
    block = lambda: Holder(experts=nn.ModuleList([linear(), linear()]), gate=linear())  # noqa: E731
    net = Holder(blocks=nn.ModuleList([block(), block()]))
    assert names(Holder(net=net)) == ["net.blocks.0", "net.blocks.1"]


def test_layers_are_the_modules_of_their_names():
    root = Holder(net=nn.Sequential(linear(), linear()))
    assert all(root.get_submodule(name) is module for name, module in find_layers(root).items())


class BasicBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


def test_a_resnet():
    resnet = Holder(
        conv1=nn.Conv2d(3, 4, 3),
        bn1=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
        layer1=nn.Sequential(BasicBlock(4), BasicBlock(4)),
        layer2=nn.Sequential(BasicBlock(4), BasicBlock(4)),
        fc=nn.Linear(4, 2),
    )
    expected = ["conv1", "bn1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert names(Holder(net=resnet)) == [f"net.{name}" for name in expected]
    assert names(resnet) == expected


def test_gpt2():
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=8, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    assert names(Holder(net=transformers.GPT2LMHeadModel(config))) == [
        "net.transformer.wte",
        "net.transformer.wpe",
        "net.transformer.h.0",
        "net.transformer.h.1",
        "net.transformer.h.2",
        "net.transformer.ln_f",
        "net.lm_head",
    ]


def test_vit():
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
    )
    found = names(Holder(net=transformers.ViTForImageClassification(config)))
    # Between transformers 4 and 5 the list of blocks moved out of `encoder`.
    assert [name.replace("encoder.layer.", "layers.") for name in found] == [
        "net.vit.embeddings",
        "net.vit.layers.0",
        "net.vit.layers.1",
        "net.vit.layernorm",
        "net.classifier",
    ]


def test_t5_in_which_both_halves_refer_to_one_embedding():
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, vocab_size=11
    )
    layers = find_layers(Holder(net=transformers.T5ForConditionalGeneration(config)))
    assert [name for name in layers if ".block." in name] == [
        "net.encoder.block.0",
        "net.encoder.block.1",
        "net.decoder.block.0",
        "net.decoder.block.1",
    ]
    assert list(layers)[-1] == "net.lm_head"
    assert len(set(layers.values())) == len(layers), "a module is found under two names"


def test_one_module_in_two_opened_wrappers_is_one_layer():
    embed = nn.Embedding(3, 2)
    half = lambda: Holder(embed=embed, blocks=nn.ModuleList([linear(), linear()]))  # noqa: E731
    layers = find_layers(Holder(encoder=half(), decoder=half()))
    assert list(layers) == [
        "encoder.embed",
        "encoder.blocks.0",
        "encoder.blocks.1",
        "decoder.blocks.0",
        "decoder.blocks.1",
    ]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_torch_transformer():
    assert names(Holder(net=nn.Transformer(8, 2, 2, 2, 8))) == [
        "net.encoder.layers.0",
        "net.encoder.layers.1",
        "net.encoder.norm",
        "net.decoder.layers.0",
        "net.decoder.layers.1",
        "net.decoder.norm",
    ]


def wrapped_mlp():
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return Holder(net=Holder(front=nn.Linear(4, 4), body=body, head=nn.Linear(4, 2)))


def test_a_single_wrapped_net_is_opened_when_more_layers_are_needed():
    assert names(wrapped_mlp()) == ["net"]
    opened = ["net.front", "net.body.0", "net.body.2", "net.head"]
    for at_least in (2, 3, 4):
        assert names(wrapped_mlp(), at_least) == opened
    # There is no more to open.
    assert names(wrapped_mlp(), 9) == opened


def test_the_largest_is_opened_first():
    small = Holder(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    large = Holder(a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    root = Holder(small=small, large=large)
    assert names(root, 2) == ["small", "large"]
    assert names(root, 3) == ["small", "large.a", "large.b"]
    assert names(root, 4) == ["small.a", "small.b", "large.a", "large.b"]


def test_an_attention_stays_whole():
    """Its `out_proj` is never called as a module, so it must not become a layer of its own."""
    root = Holder(attention=nn.MultiheadAttention(8, 2), head=nn.Linear(8, 2))
    assert names(root) == ["attention", "head"]
    assert names(root, 5) == ["attention", "head"]
    block = Holder(block=nn.TransformerEncoderLayer(8, 2, 8))
    parts = ["self_attn", "linear1", "linear2", "norm1", "norm2"]
    assert names(block) == ["block"]
    assert names(block, 2) == [f"block.{part}" for part in parts]
    assert names(block, 9) == [f"block.{part}" for part in parts]


@pytest.mark.parametrize(
    "root", [Holder(), Holder(loss=nn.MSELoss(), net=nn.Sequential(nn.ReLU()))]
)
def test_nothing_to_place(root):
    with pytest.raises(LayerError, match=r"`Holder` has no module with parameters.*`__init__`"):
        require_layers(root, find_layers(root).values())


class Named(Holder):
    def __init__(self, choose, **parts):
        super().__init__(**parts)
        self.choose = choose

    def configure_layers(self):
        return self.choose(self)


def named(choose):
    body = nn.Sequential(linear(), nn.ReLU(), linear())
    return Named(choose, front=linear(), body=body, head=linear())


def test_the_user_names_the_layers():
    root = named(lambda m: [m.front, m.body, m.head])
    assert names(root) == names(root, 9) == ["front", "body", "head"]
    assert names(named(lambda m: (m.head, m.body[0]))) == ["head", "body.0"]
    # A module without parameters, if the user says so.
    assert names(named(lambda m: [m.front, m.body[1]])) == ["front", "body.1"]


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda m: None, "returned NoneType; it has to return a non-empty list"),
        (lambda m: [], "returned list; it has to return a non-empty list"),
        (lambda m: {"front": m.front}, "returned dict"),
        (lambda m: m.front, "returned Linear"),
        (lambda m: ["front"], "returned 'front', which is not a module inside"),
        (lambda m: [m.front, linear()], r"returned Linear\(.*not a module inside.*attributes"),
        (lambda m: [m], "not a module inside this LightningModule"),
        (lambda m: [m.front, m.head, m.front], "names 'front' twice. Name every layer once"),
        (lambda m: [m.body, m.body[2]], "names 'body' and, inside it, 'body.2'.*one of the two"),
        (lambda m: [m.body[2], m.front, m.body], "names 'body' and, inside it, 'body.2'"),
    ],
)
def test_what_the_user_may_not_name(choose, words):
    with pytest.raises(LayerError, match=f"(?s)`configure_layers`.*{words}"):
        find_layers(named(choose))


def test_layers_inside_each_other_under_another_name():
    """`alias` comes first in the module tree, so the inner layer's name does not start with the
    outer one's.
    """
    body = nn.Sequential(linear(), linear())
    root = Named(lambda m: [m.body, m.alias], alias=body[0], body=body)
    with pytest.raises(LayerError, match="inside it"):
        find_layers(root)


def test_what_is_compiled_and_contains_layers_is_named():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled: Any = torch.compile(inner, backend="eager")
    root = nn.Sequential(compiled, nn.Linear(2, 2), nn.Linear(2, 2))
    root[1].compile(backend="eager")
    assert compiled_around(root, [*inner, root[1], root[2]]) == ["0"]
    assert compiled_around(root, [root[0], root[1], root[2]]) == []
