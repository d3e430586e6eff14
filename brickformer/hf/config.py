"""A config.json, read strictly: every field is understood, or known to change nothing, or an error.

A family asks for the fields it turns into a spec; `finish` then looks at what nobody asked for. What only names,
trains, caches or prints is in `SILENT`; anything else may change what the model computes, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar, cast, final

from brickformer.errors import SpecError, nearest

Json = Mapping[str, Any]
T = TypeVar("T")
_MISSING: Final = object()
LARGE: Final = 2**53
"""No number of a configuration comes near."""
MOST: Final = 10_000
"""Layers, heads or experts: more are a broken file, and would be built for hours."""

SILENT: Final = frozenset(
    """
    architectures model_type transformers_version _name_or_path torch_dtype dtype use_cache name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    initializer_range initializer_factor init_std init_method pretraining_tp keys_to_ignore_at_inference
    max_position_embeddings output_attentions output_hidden_states return_dict torchscript is_encoder_decoder
    id2label label2id problem_type finetuning_task task_specific_params use_bfloat16 tf_legacy_loss
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise ep_size
    gradient_checkpointing attn_implementation _attn_implementation _attn_implementation_internal
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix
    tokenizer_class language classifier_dropout attention_softmax_in_fp32 masked_softmax_fusion n_ctx
    """.split()
)
"""Fields that change no logit: names, initial values, training, generation settings, kernels."""

PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "tie_encoder_decoder": (False, None),
}
"""Fields that every configuration may have, and the values of theirs that change nothing."""

_WHY: Final = {
    "auto_map": "it asks to run code of its own, and none is run. If the model is the library's own, remove the field",
    "quantization_config": "its weights are packed. Take the checkpoint they were made from",
}


@final
class Config:
    """The fields of one config.json. where: the file, for messages.

    tensors: the names of the weights beside it, for what a family says only there; empty where nobody knows them.
    """

    def __init__(self, data: Json, where: str = "config.json", tensors: Collection[str] = ()) -> None:
        self.data, self.where, self.tensors = data, where, tensors
        self._read: set[str] = set()

    @property
    def architecture(self) -> str:
        """The class it was saved from, "LlamaForCausalLM"; empty where the file does not say."""
        named = self.data.get("architectures") or [""]
        named = [named] if isinstance(named, str) else named
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise self.refuse("architectures", "a list of names")
        return str(named[0])

    def refuse(self, name: str, expected: str, do: str = "") -> SpecError:
        """The error for a value that cannot be: where, got, expected, what to do."""
        got = repr(self.data.get(name))
        got = got if len(got) <= 60 else got[:57] + "..."
        return SpecError(f"{self.where}: {name}: got {got}, expected {expected}." + (f" {do}" if do else ""))

    def has(self, name: str) -> bool:
        """Whether the field is there and not null; it counts as read."""
        self._read.add(name)
        return self.data.get(name) is not None

    def get(self, names: str, kind: type[T], default: Any = _MISSING) -> T:
        """A field of that type; `default` where it is absent. null is a value only where the default is None.

        names: one, or several that mean the same, as "n_embd|hidden_size". Errors: SpecError: missing, wrong type.
        """
        found = [name for name in names.split("|") if name in self.data]
        self._read.update(found)
        if not found:
            if default is _MISSING:
                raise SpecError(f"{self.where}: {names.split('|')[0]}: missing; the model needs it.")
            return cast(T, default)
        name, value = found[0], self.data[found[0]]
        for other in found[1:]:
            if self.data[other] != value:
                raise self.refuse(other, f"{value!r}, as {name} says the same")
        if value is None and default is None:
            return cast(T, None)
        if kind is float and type(value) is int and abs(value) < LARGE:
            value = float(value)
        absurd = isinstance(value, int | float) and not abs(value) < LARGE  # NaN is, too
        if type(value) is not kind or absurd:
            raise self.refuse(name, {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text"))
        return value

    def count(self, names: str, default: Any = _MISSING) -> int:
        """How many of something there are: layers, heads, experts. Errors: SpecError, for absurd numbers too."""
        value = self.get(names, int, default)
        if not 1 <= value <= MOST:
            raise self.refuse(self._said(names), f"1 to {MOST}")
        return value

    def _said(self, names: str) -> str:
        """The one of several names that the file has."""
        return next(name for name in names.split("|") if name in self.data)

    def optional(self, name: str, kind: type[T], absent: T | None) -> T | None:
        """A field that may be null, as None, and means `absent` where it is not there at all."""
        return self.get(name, kind, None) if name in self.data else absent

    def choice(self, names: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """A field that is one of some words, as what it means to us. Errors: SpecError naming the nearest word."""
        value = self.get(names, str, _MISSING if default is None else default)
        if value not in choices:
            raise self.refuse(self._said(names), f"a known one; {nearest(value, choices).rstrip('.')}")
        return choices[value]

    def only(self, name: str, *values: Any, do: str = "") -> None:
        """A field that may be absent, else must have one of these values: for others there is no brick.

        Errors: SpecError.
        """
        self._read.add(name)
        if name in self.data and not any(type(self.data[name]) is type(v) and self.data[name] == v for v in values):
            raise self.refuse(name, " or ".join(map(repr, values)), do or "No brick computes it otherwise.")

    def part(self, name: str) -> Config:
        """A field that is an object, read as strictly as the whole; `finish` it too."""
        self._read.add(name)
        value = self.data[name]
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Config(value, f"{self.where}: {name}")

    def skip(self, *names: str) -> None:
        """Fields that this family knows to change nothing."""
        self._read.update(names)

    def finish(self) -> None:
        """Every field was understood. Errors: SpecError naming the first that was not."""
        for name, values in PLAIN.items():
            self.only(name, *values, do=_WHY.get(name, "No brick computes it otherwise").rstrip(".") + ".")
        for name in self.data:
            if name not in self._read and name not in SILENT:
                raise SpecError(
                    f"{self.where}: {name}: got {str(self.data[name])[:60]!r}, a field that no table understands; "
                    "it may change what the model computes. If it does not, remove it."
                )
