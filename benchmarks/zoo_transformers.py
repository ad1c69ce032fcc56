"""Every architecture of transformers, shrunk until it trains in milliseconds.

A configuration's numbers are made small by their names: few layers, few heads, narrow. What a
library this large cannot follow that way (sizes that depend on each other in ways of their own)
fails to build, and the sweep counts it as not built.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

NUM_TOKENS = 16
VOCABULARY = 64
NUM_LAYERS = 3
WIDTH = 32
NUM_HEADS = 4
IMAGE_SIZE = 32
PATCH_SIZE = 8
MOST_PARAMETERS = 40_000_000

_TOO_LARGE = "it could not be shrunk"

# The first of these that an architecture has: a model with a head and a loss of its own first.
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
# Others, for architectures that have an earlier one of the list, too.
_MORE_HEADS = ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",)

# What a number of this name becomes. The first that matches the whole name counts.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r"num_feat_extract_layers|.*conv.*_layers", None),
    (r"mamba_d_head", 16),
    (r"mamba_n_groups", 1),
    (r"(num_|n_)?(key_value|kv)_heads|num_key_value_heads|n_head_kv|num_kv_heads", 2),
    (r".*(num_|n_).*heads?|.*attention_heads|n_heads?|num_heads", NUM_HEADS),
    (r".*head_dim|attention_head_size|d_kv|.*key_length|kv_channels", WIDTH // NUM_HEADS),
    (r"vocab_size|.*_vocab_size|vocabulary_size|n_vocab|codebook_size", VOCABULARY),
    (r"type_vocab_size", 2),
    (r"num_hidden_layers|num_layers|n_layers?|.*_layers|.*_num_layers|num_blocks", NUM_LAYERS),
    (r".*intermediate_size|.*ffn_dim|d_ff|ffn_hidden_size|.*mlp_dim|n_inner|d_inner", 2 * WIDTH),
    (r".*hidden_size|d_model|n_embd|.*embed_dim|.*embedding_size|dim|.*hidden_dim", WIDTH),
    (r".*lora_rank|.*low_rank.*|lora_r", 8),
    (r"image_size|input_size|img_size", IMAGE_SIZE),
    (r"patch_size", PATCH_SIZE),
    (r"(num|n)_.*experts_per_tok|num_experts_per_token|top_k|moe_topk|.*moe_k", 2),
    (r"(num|n)_shared_experts", 1),
    (r"(num|n)_.*experts|num_experts|moe_num_experts", 4),
    (r"n_groups?|topk_group|num_expert_groups?", 1),
    (r".*max_position_embeddings|n_positions|max_.*positions|n_ctx|max_seq_len.*", 64),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r".*projection_dim|.*proj_size|.*state_size|d_state|mamba_d_state|state_dim", 16),
    (r"num_queries", 8),
    (r"num_channels|in_channels", 3),
    (r"num_labels", 4),
)
# What a configuration makes of its other numbers, if it is not given.
_FOLLOWS_THE_REST = ("out_features", "out_indices", "stage_names", "per_layer_config")
_RATES = re.compile(r".*drop(out|_rate|_path.*|_prob)?|.*dropout.*|layerdrop")


def model_types() -> dict[str, str]:
    """The class of every model type that has one for training."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = {}
    for model_type in CONFIG_MAPPING_NAMES:
        for head in _HEADS:
            name = getattr(modeling_auto, head).get(model_type)
            if name is not None:
                found[model_type] = name if isinstance(name, str) else name[0]
                break
    return found


def more_heads() -> list[tuple[str, str]]:
    """The model types and classes of the mappings that :func:`model_types` leaves out."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    first = set(model_types().items())
    found: dict[tuple[str, str], None] = {}
    for head in (*_HEADS[:-1], *_MORE_HEADS):
        for model_type, name in getattr(modeling_auto, head).items():
            pair = model_type, name if isinstance(name, str) else name[0]
            if model_type in CONFIG_MAPPING_NAMES and pair not in first:
                found[pair] = None
    return list(found)


def choices() -> Iterator[dict[str, Any]]:
    """Ways to shrink a configuration, of which the first that trains is taken."""
    for keeps_rope in (False, True):
        for kv_heads in (2, NUM_HEADS):
            yield {"keeps_rope": keeps_rope, "kv_heads": kv_heads, "head": True}
    yield {"keeps_rope": True, "kv_heads": NUM_HEADS, "head": False}


def is_small(model_type: str, class_name: str, options: Mapping[str, Any]) -> bool:
    """Whether a model made in this way is small, or may be: it is found without memory."""
    try:
        with torch.device("meta"):
            create(model_type, class_name, options, 0.0)
    except ValueError as error:
        return _TOO_LARGE not in str(error)
    except Exception:  # the meta device's own, or the model's: building it tells
        pass
    return True


def create(model_type: str, class_name: str, options: Mapping[str, Any], rate: float) -> nn.Module:
    """A tiny model.

    Args:
        model_type: of the configuration.
        class_name: the model's.
        options: one of :func:`choices`.
        rate: of all dropouts.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrunk(CONFIG_MAPPING[model_type], options, rate)
    if not options["head"]:
        model: nn.Module = transformers.AutoModel.from_config(config)
    else:
        model = getattr(transformers, class_name)(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{_TOO_LARGE}: {num_parameters} parameters are left")
    return model


def shrunk(config_class: Any, options: Mapping[str, Any], rate: float) -> Any:
    """A configuration of this class with small numbers."""
    default = config_class()
    changes = _changes(default.to_dict(), default, options, rate)
    config = config_class(**changes)
    for name in ("use_cache", "output_attentions", "output_hidden_states"):
        if isinstance(getattr(config, name, None), bool):
            setattr(config, name, False)
    return config


def _changes(
    numbers: Mapping[str, Any], config: Any, options: Mapping[str, Any], rate: float
) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"):
            continue
        if isinstance(value, dict) and hasattr(getattr(config, name, None), "to_dict"):
            part = getattr(config, name)
            inner = _changes(value, part, options, rate)
            changes[name] = inner | {"model_type": part.model_type}
        elif name.startswith("rope_") and not isinstance(value, int | float):
            if options["keeps_rope"] or "mrope_section" in str(value):
                changes[name] = _small_rope(value)
        elif name in _FOLLOWS_THE_REST:
            continue
        elif name == "attention_types":  # GPT-Neo's
            changes[name] = [[["global", "local", "global"], 1]]
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types"):
            if isinstance(value, list) and options["keeps_rope"]:
                changes[name] = _varied(value, NUM_LAYERS)
        else:
            changes[name] = _small(name, value, options, rate)
    return changes


def _small_rope(parameters: Any) -> Any:
    """Multimodal positions share the halves of a head among time, height and width."""
    if not isinstance(parameters, dict):
        return parameters
    small = {name: _small_rope(value) for name, value in parameters.items()}
    if "mrope_section" in small:
        small["mrope_section"] = [2, 1, 1]
    return small


def _varied(values: list[Any], count: int) -> list[Any]:
    """So many of a list, with every kind that it has, if there is room for all."""
    kinds = list(dict.fromkeys(values))[:count]
    return [kinds[i % len(kinds)] for i in range(count)]


def _small(name: str, value: Any, options: Mapping[str, Any], rate: float) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return rate if _RATES.fullmatch(name) and value < 1 else value
    if isinstance(value, int):
        if name.endswith(("token_id", "_token_index")):
            return value if 0 <= value < VOCABULARY else value % 8
        for pattern, size in _SIZES:
            if re.fullmatch(pattern, name):
                if "kv_heads" in pattern:
                    size = options["kv_heads"]
                return min(value, size) if size is not None and value > 0 else value
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return _small_list(name, value)
    return value


def _small_list(name: str, values: list[int]) -> list[int]:
    if re.fullmatch(r"depths?|num_blocks|layers|.*num_layers", name):
        return [1] * len(values)
    if re.fullmatch(r".*hidden_sizes|.*embed_dims?|.*channels|dims?|.*widths?", name):
        sizes = [8 * 2**i for i in range(len(values))]
        return [3, *sizes[1:]] if values[0] == 3 else sizes
    if re.fullmatch(r".*num_.*heads|num_heads|n_heads", name):
        return [2 ** min(i, 2) for i in range(len(values))]
    if name in ("image_size", "input_size", "img_size"):
        return [IMAGE_SIZE] * len(values)
    if name == "patch_size":
        return [PATCH_SIZE] * len(values)
    if name.endswith("token_id"):
        return [value % 8 for value in values]
    return values


def batch_of(model: nn.Module, size: int, generator: torch.Generator) -> Batch:
    """The arguments of the model's ``forward``, by its main input's name."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    text = getattr(config, "text_config", config)
    vocabulary = min(getattr(text, "vocab_size", None) or VOCABULARY, VOCABULARY)

    def tokens() -> Tensor:
        return torch.randint(8, vocabulary, (size, NUM_TOKENS), generator=generator)

    batch: Batch = {}
    if main == "input_ids" or ("input_ids" in accepted and main not in accepted):
        batch["input_ids"] = tokens()
    elif main == "pixel_values":
        channels = getattr(config, "num_channels", None) or 3
        image = getattr(config, "image_size", None) or IMAGE_SIZE
        height, width = image if isinstance(image, list | tuple) else (image, image)
        shape = [size, channels, height, width]
        frames = getattr(config, "num_frames", None)
        if frames:
            shape = [size, frames, channels, height, width]
        batch["pixel_values"] = torch.randn(shape, generator=generator)
    elif main == "input_values":
        if getattr(config, "num_mel_bins", None):
            length = getattr(config, "max_length", None) or NUM_TOKENS
            batch[main] = torch.randn(size, length, config.num_mel_bins, generator=generator)
        else:
            batch[main] = torch.randn(size, 4000, generator=generator)
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
        length = 2 * (getattr(config, "max_source_positions", None) or NUM_TOKENS)
        time_last = "Whisper" in type(model).__name__
        shape = [size, bins, length] if time_last else [size, length, bins]
        batch[main] = torch.randn(shape, generator=generator)
    elif main == "past_values":
        length = getattr(config, "context_length", NUM_TOKENS)
        lags = max(getattr(config, "lags_sequence", None) or [0])
        channels = getattr(config, "num_input_channels", None) or getattr(config, "input_size", 1)
        shape = [size, length + lags] if channels == 1 else [size, length + lags, channels]
        batch[main] = torch.randn(shape, generator=generator)
        future = getattr(config, "prediction_length", 4)
        if "past_time_features" in accepted:
            features = getattr(config, "num_time_features", 0)
            batch["past_time_features"] = torch.randn(
                size, length + lags, features, generator=generator
            )
            batch["future_time_features"] = torch.randn(size, future, features, generator=generator)
            batch["past_observed_mask"] = torch.ones(shape)
        if "future_values" in accepted:
            batch["future_values"] = torch.randn([size, future, *shape[2:]], generator=generator)
    else:
        raise ValueError(f"nothing is known of the input {main!r}")
    if "decoder_input_ids" in accepted:
        batch["decoder_input_ids"] = tokens()
    if "bbox" in accepted:
        batch["bbox"] = torch.tensor([1, 1, 5, 5]).repeat(size, NUM_TOKENS, 1)
    if "pixel_values" in accepted and "pixel_values" not in batch and "clip" in config.model_type:
        batch["pixel_values"] = torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    if "labels" in accepted:
        labels = _labels(model, batch, tokens)
        if labels is not None:
            batch["labels"] = labels
    return batch


def _labels(model: nn.Module, batch: Batch, tokens: Any) -> Tensor | None:
    name = type(model).__name__
    if any(head in name for head in ("LM", "ConditionalGeneration", "MaskedLM", "Seq2Seq")):
        return batch["decoder_input_ids"] if "decoder_input_ids" in batch else tokens()
    if "Classification" in name:
        size = next(iter(batch.values())).shape[0]
        return torch.arange(size) % 2
    return None
