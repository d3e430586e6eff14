"""Our models against transformers': tiny, random, on the CPU, float64; every weight is copied, every logit compared.

Each family is a spec, a configuration, and a table of which of our parameters is made of which of theirs. Weights are
loaded strictly, so a table that forgets a parameter fails by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from contract.checks import close
from torch import Tensor, nn

from brickformer.embed import Embed, Head
from brickformer.feedforward import GLU, MLP
from brickformer.layers import Layer, pattern
from brickformer.mask import EMPTY, FULL, Mask, Span
from brickformer.mixers.attention import Attention
from brickformer.mixers.cross import Cross
from brickformer.mixers.latent import LatentAttention
from brickformer.models import Decoder, DecoderModel, Encoder, EncoderDecoder
from brickformer.moe import MoE, Router
from brickformer.norms import LayerNorm, RMSNorm
from brickformer.positions import Alibi, Learned, Linear, Llama3, Rope, Sinusoid, T5Bias, Yarn
from brickformer.positions.bias import alibi_slopes
from brickformer.positions.rotary import RopeScaling

pytestmark = pytest.mark.unchecked

V, D, H, G, F, L, T = 13, 16, 4, 2, 24, 2, 9
EXACT = 1e-11
NEAR = 1e-5  # for models whose norms or rotary angles are computed in float32 whatever the model's type
LEFT = torch.tensor([[1] * 9, [0] * 3 + [1] * 6]).bool()
RIGHT = torch.tensor([[1] * 9, [1] * 4 + [0] * 5]).bool()
Make = Callable[["Theirs"], Tensor]


class Theirs:
    """Their parameters by name, in float64; `cat` stacks some, `t` transposes one."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.all, self.prefix = dict(model.state_dict()), prefix

    def __call__(self, name: str) -> Tensor:
        return self.all[self.prefix + name].clone()

    def cat(self, *names: str) -> Tensor:
        """Parameters stacked along their first axis."""
        return torch.cat([self(name) for name in names])

    def below(self, prefix: str) -> Theirs:
        """The parameters of one part."""
        part = object.__new__(Theirs)
        part.all, part.prefix = self.all, f"{self.prefix}{prefix}."
        return part


def built(kind: Any, **options: Any) -> Any:
    """Their model, eager attention, every parameter random."""
    torch.manual_seed(1)
    config = kind.config_class(**options)
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config).double().eval()
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, dtype=torch.float64)
        p.data = noise * p.shape[-1] ** -0.5 * 1.5 if p.ndim > 1 else p.data + 0.3 * noise
        assert p.dtype is torch.float64, name
    return model


def parts(prefix: str, theirs: Theirs, table: dict[str, Any]) -> dict[str, Tensor]:
    """Our names -> tensors; a table says where each comes from: their name, or a function of their parameters."""
    return {f"{prefix}{mine}": theirs(made) if isinstance(made, str) else made(theirs) for mine, made in table.items()}


def cat(*names: str) -> Make:
    return lambda theirs: theirs.cat(*names)


def linear(mine: str, theirs: str) -> dict[str, Any]:
    """Weight and bias."""
    return {f"{mine}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


# ---- decoders -------------------------------------------------------------------------------------------------------


@dataclass
class Family:
    """A spec of ours, a model of theirs, and the tables."""

    spec: Decoder
    kind: Any
    options: dict[str, Any]
    layer: dict[str, Any]
    rest: dict[str, Any]
    layers: str = "model.layers"
    takes_positions: bool = True
    tolerance: float = NEAR


LLAMA_SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA_LAYER = {
    "mixer.qkv.weight": cat(*(f"self_attn.{n}_proj.weight" for n in "qkv")),
    "mixer.out.weight": "self_attn.o_proj.weight",
    "around_mixer.into.weight": "input_layernorm.weight",
    "around_ffn.into.weight": "post_attention_layernorm.weight",
    "ffn.gate_up.weight": cat("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.out.weight": "mlp.down_proj.weight",
}
LLAMA_REST = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "stack.norm.weight": "model.norm.weight",
    "head.project.weight": "lm_head.weight",
}


def rope(kind: str = "default", theta: float = 10_000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


def llama(position: Rope, rope_options: dict[str, Any], kind: Any = hf.LlamaForCausalLM, **mixer: Any) -> Family:
    layer = Layer(Attention(H, kv_heads=G, position=position, **mixer), GLU(F), norm=RMSNorm(eps=1e-6))
    spec = Decoder(V, D, pattern([layer], L), head=Head(tied=False))
    return Family(
        spec, kind, {**LLAMA_SIZES, "rms_norm_eps": 1e-6, **rope_options}, dict(LLAMA_LAYER), dict(LLAMA_REST)
    )


def mistral() -> Family:
    made = llama(Rope(), rope(), hf.MistralForCausalLM, mask=Mask(window=3))
    made.options["sliding_window"] = 3
    return made


def qwen3() -> Family:
    made = llama(Rope(theta=500.0), rope(theta=500.0), hf.Qwen3ForCausalLM, head_dim=6, qk_norm=RMSNorm(eps=1e-6))
    made.options["head_dim"] = 6
    made.layer |= {"mixer.q_norm.weight": "self_attn.q_norm.weight", "mixer.k_norm.weight": "self_attn.k_norm.weight"}
    return made


def gemma2() -> Family:
    """Norms before and after each branch, soft caps, a window in every other layer, gains stored as 1 + w."""
    layers = [
        Layer(
            Attention(H, kv_heads=G, head_dim=6, position=Rope(), mask=Mask(window=w), softcap=5.0, scale=1 / 3),
            GLU(F, activation="gelu_tanh"),
            place="peri",
            norm=RMSNorm(eps=1e-6),
        )
        for w in (3, None)
    ]
    norms = {
        "around_mixer.into": "input_layernorm",
        "around_mixer.out": "post_attention_layernorm",
        "around_ffn.into": "pre_feedforward_layernorm",
        "around_ffn.out": "post_feedforward_layernorm",
    }
    layer = {k: v for k, v in LLAMA_LAYER.items() if not k.startswith("around")}
    layer |= {f"{mine}.weight": lambda t, n=name: 1 + t(f"{n}.weight") for mine, name in norms.items()}
    rest = LLAMA_REST | {
        "stack.norm.weight": lambda t: 1 + t("model.norm.weight"),
        "head.project.weight": "model.embed_tokens.weight",
    }
    options = (
        LLAMA_SIZES
        | rope()
        | {
            "head_dim": 6,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
            "query_pre_attn_scalar": 9,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
    )
    spec = Decoder(V, D, tuple(layers), embed=Embed(scaled=True), head=Head(softcap=7.0))
    return Family(spec, hf.Gemma2ForCausalLM, options, layer, rest)


def phi() -> Family:
    """Attention and feed-forward read the same input; half of each head is turned."""
    layer = Layer(
        Attention(H, position=Rope(width=2), bias=True),
        MLP(F, activation="gelu_tanh"),
        arrange="parallel",
        norm=LayerNorm(eps=1e-5),
    )
    table = {
        **{f"mixer.qkv.{k}": cat(*(f"self_attn.{n}_proj.{k}" for n in "qkv")) for k in ("weight", "bias")},
        **linear("mixer.out", "self_attn.dense"),
        **linear("around.into", "input_layernorm"),
        **linear("ffn.into", "mlp.fc1"),
        **linear("ffn.out", "mlp.fc2"),
    }
    rest = {
        "embed.tokens.weight": "model.embed_tokens.weight",
        **linear("stack.norm", "model.final_layernorm"),
        **linear("head.project", "lm_head"),
    }
    options = {k: v for k, v in LLAMA_SIZES.items() if k != "num_key_value_heads"} | rope(partial_rotary_factor=0.5)
    options |= {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}
    spec = Decoder(V, D, pattern([layer], L), head=Head(tied=False, bias=True))
    return Family(spec, hf.PhiForCausalLM, options, table, rest)


def gpt_neox() -> Family:
    """Attention and feed-forward read the same input, each through a norm of its own; q, k and v head by head."""
    layer = Layer(
        Attention(H, position=Rope(width=2), bias=True),
        MLP(F, activation="gelu"),
        arrange="parallel_norms",
        norm=LayerNorm(eps=1e-5),
    )

    def by_head(name: str) -> Make:
        """Their rows are (H, 3, K), ours (3, H, K)."""
        return lambda t: (
            t(f"attention.query_key_value.{name}").unflatten(0, (H, 3, D // H)).transpose(0, 1).flatten(0, 2)
        )

    table = {
        "mixer.qkv.weight": by_head("weight"),
        "mixer.qkv.bias": by_head("bias"),
        **linear("mixer.out", "attention.dense"),
        **linear("around_mixer.into", "input_layernorm"),
        **linear("around_ffn.into", "post_attention_layernorm"),
        **linear("ffn.into", "mlp.dense_h_to_4h"),
        **linear("ffn.out", "mlp.dense_4h_to_h"),
    }
    rest = {
        "embed.tokens.weight": "gpt_neox.embed_in.weight",
        **linear("stack.norm", "gpt_neox.final_layer_norm"),
        "head.project.weight": "lm_head.weight",
    }
    options = {k: v for k, v in LLAMA_SIZES.items() if k != "num_key_value_heads"} | rope(partial_rotary_factor=0.5)
    options |= {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.5, "use_parallel_residual": True}
    spec = Decoder(V, D, pattern([layer], L), head=Head(tied=False))
    return Family(spec, hf.GPTNeoXForCausalLM, options, table, rest, layers="gpt_neox.layers")


def gpt2() -> Family:
    layer = Layer(Attention(H, bias=True), MLP(4 * D, activation="gelu_tanh"), norm=LayerNorm(eps=1e-5))

    def turned(mine: str, theirs: str) -> dict[str, Any]:
        """Their Conv1D stores the transpose."""
        return {f"{mine}.weight": lambda t: t(f"{theirs}.weight").T, f"{mine}.bias": f"{theirs}.bias"}

    table = {
        **turned("mixer.qkv", "attn.c_attn"),
        **turned("mixer.out", "attn.c_proj"),
        **turned("ffn.into", "mlp.c_fc"),
        **turned("ffn.out", "mlp.c_proj"),
        **linear("around_mixer.into", "ln_1"),
        **linear("around_ffn.into", "ln_2"),
    }
    rest = {
        "embed.tokens.weight": "transformer.wte.weight",
        "embed.position.table.weight": "transformer.wpe.weight",
        "head.project.weight": "transformer.wte.weight",
        **linear("stack.norm", "transformer.ln_f"),
    }
    options = {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": 32, "bos_token_id": None}
    options |= {"eos_token_id": None}
    spec = Decoder(V, D, pattern([layer], L), embed=Embed(position=Learned(32)))
    return Family(spec, hf.GPT2LMHeadModel, options, table, rest, layers="transformer.h", tolerance=EXACT)


def bloom() -> Family:
    """ALiBi, a norm after the embedding, and q, k, v of each head side by side."""
    layer = Layer(Attention(H, bias=True, position=Alibi()), MLP(4 * D, activation="gelu_tanh"), norm=LayerNorm())

    def split(kind: str) -> Make:
        def make(t: Theirs) -> Tensor:
            x = t(f"self_attention.query_key_value.{kind}")
            x = x.view(H, 3, D // H, *x.shape[1:])
            return torch.cat([x[:, i].flatten(0, 1) for i in range(3)])

        return make

    table = {
        "mixer.qkv.weight": split("weight"),
        "mixer.qkv.bias": split("bias"),
        **linear("mixer.out", "self_attention.dense"),
        **linear("ffn.into", "mlp.dense_h_to_4h"),
        **linear("ffn.out", "mlp.dense_4h_to_h"),
        **linear("around_mixer.into", "input_layernorm"),
        **linear("around_ffn.into", "post_attention_layernorm"),
    }
    rest = {
        "embed.tokens.weight": "transformer.word_embeddings.weight",
        "head.project.weight": "transformer.word_embeddings.weight",
        **linear("embed.norm", "transformer.word_embeddings_layernorm"),
        **linear("stack.norm", "transformer.ln_f"),
    }
    options = {"vocab_size": V, "hidden_size": D, "n_layer": L, "n_head": H, "bos_token_id": None, "eos_token_id": None}
    options |= {"pad_token_id": None}
    spec = Decoder(V, D, pattern([layer], L), embed=Embed(norm=LayerNorm()))
    return Family(spec, hf.BloomForCausalLM, options, table, rest, layers="transformer.h", takes_positions=False)


def deepseek_v2() -> Family:
    """Latent attention with dense feed-forwards; its rotary pairs are neighbours."""
    mixer = LatentAttention(
        H, rank=6, rope_dim=2, head_dim=4, v_dim=3, q_rank=5, position=Rope(layout="interleaved"), norm=RMSNorm(1e-6)
    )
    spec = Decoder(V, D, pattern([Layer(mixer, GLU(F), norm=RMSNorm(1e-6))], L), head=Head(tied=False))

    def by_head(name: str, first: int, second: int) -> Make:
        """(H · (first + second), ...) -> all firsts, then all seconds."""

        def make(t: Theirs) -> Tensor:
            x = t(name)
            x = x.view(H, first + second, *x.shape[1:])
            return torch.cat([x[:, :first].flatten(0, 1), x[:, first:].flatten(0, 1)])

        return make

    table = {k: v for k, v in LLAMA_LAYER.items() if k != "mixer.qkv.weight"} | {
        "mixer.q_down.0.weight": "self_attn.q_a_proj.weight",
        "mixer.q_down.1.weight": "self_attn.q_a_layernorm.weight",
        "mixer.q_up.weight": by_head("self_attn.q_b_proj.weight", 4, 2),
        "mixer.down.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "mixer.norm.weight": "self_attn.kv_a_layernorm.weight",
        "mixer.up.weight": by_head("self_attn.kv_b_proj.weight", 4, 3),
    }
    options = (
        LLAMA_SIZES
        | rope()
        | {
            "num_key_value_heads": H,
            "first_k_dense_replace": L,
            "q_lora_rank": 5,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
            "rms_norm_eps": 1e-6,
        }
    )
    return Family(spec, hf.DeepseekV2ForCausalLM, options, table, dict(LLAMA_REST))


def mixtral() -> Family:
    """Two of four experts a token, their weights summing to 1."""
    made = llama(Rope(), rope(), hf.MixtralForCausalLM)
    made.spec = made.spec.but(**{"layers.*.ffn": MoE(4, GLU(F), Router(top_k=2))})
    made.options |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    del made.layer["ffn.gate_up.weight"], made.layer["ffn.out.weight"]
    made.layer["ffn.router.project.weight"] = "mlp.gate.weight"
    made.layer["ffn.router.bias"] = lambda t: torch.zeros(4)
    for e in range(4):
        made.layer[f"ffn.experts.{e}.gate_up.weight"] = lambda t, e=e: t("mlp.experts.gate_up_proj")[e]
        made.layer[f"ffn.experts.{e}.out.weight"] = lambda t, e=e: t("mlp.experts.down_proj")[e]
    return made


LLAMA3 = Llama3(factor=4.0, original=16, low=1.0, high=4.0)
FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": lambda: llama(Rope(), rope()),
    "llama3": lambda: llama(
        Rope(theta=20.0, scaling=LLAMA3),
        rope(
            "llama3", 20.0, factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "yarn": lambda: llama(
        Rope(theta=20.0, scaling=Yarn(factor=4.0, original=16, fast=3.0, slow=0.5)),
        rope("yarn", 20.0, factor=4.0, original_max_position_embeddings=16, beta_fast=3.0, beta_slow=0.5),
    ),
    "mistral": mistral,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "phi": phi,
    "gpt_neox": gpt_neox,
    "gpt2": gpt2,
    "bloom": bloom,
    "deepseek_v2": deepseek_v2,
    "mixtral": mixtral,
}


def pair(family: Family) -> tuple[DecoderModel, Any]:
    """Both models, with the same weights."""
    theirs = built(family.kind, **family.options)
    weights, mine = Theirs(theirs), family.spec.build().double().eval()
    state = parts("", weights, family.rest)
    for i in range(L):
        state |= parts(f"stack.layers.{i}.", weights.below(f"{family.layers}.{i}"), family.layer)
    mine.load_state_dict(state, strict=True)
    return mine, theirs


def ids_of(rows: int = 2, tokens: int = T, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_decoder_logits_full_padded_and_cached(name: str) -> None:
    family = FAMILIES[name]()
    mine, theirs = pair(family)
    ids, tolerance = ids_of(), family.tolerance
    with torch.no_grad():
        expected = theirs(ids).logits
        close(mine(ids), expected, "full", tolerance)
        state = mine.init_state(2, T)
        steps = [mine(ids[:, a:b], state=state) for a, b in [(0, 4), *((i, i + 1) for i in range(4, T))]]
        close(torch.cat(steps, 1), expected, "ours with a cache against theirs without", tolerance)
        mine, theirs = mine.float(), theirs.float()  # in float64 their left padding turns into NaN
        for side, valid in (("left", LEFT), ("right", RIGHT)):
            at = Span.of(ids, valid=valid)
            assert at.pos is not None
            told = {"position_ids": at.pos.masked_fill(at.pos == EMPTY, 1)} if family.takes_positions else {}
            padded = theirs(ids, attention_mask=valid.long(), **told).logits
            close(mine(ids, at)[valid], padded[valid], f"padded {side}", NEAR)


def test_the_comparison_can_fail() -> None:
    family = llama(Rope(theta=9_000.0), rope())
    mine, theirs = pair(family)
    with torch.no_grad(), pytest.raises(AssertionError, match="differs by"):
        close(mine(ids_of()), theirs(ids_of()).logits, "another theta", NEAR)


def test_llama_in_float32() -> None:
    mine, theirs = pair(llama(Rope(), rope()))
    with torch.no_grad():
        close(mine.float()(ids_of()), theirs.float()(ids_of()).logits, "float32", 1e-5)


def test_gradients_of_llama() -> None:
    mine, theirs = pair(llama(Rope(), rope()))
    weight = torch.randn(2, T, V, dtype=torch.float64)
    (mine(ids_of()) * weight).sum().backward()
    (theirs(ids_of()).logits * weight).sum().backward()
    for got, expected in (
        (mine.embed.tokens.weight, theirs.model.embed_tokens.weight),
        (mine.stack.norm.weight, theirs.model.norm.weight),
        (mine.stack.layers[0].ffn.out.weight, theirs.model.layers[0].mlp.down_proj.weight),
    ):
        close(got.grad, expected.grad, "gradient", 1e-4)
    q, k, v = mine.stack.layers[1].mixer.qkv.weight.grad.split(mine.stack.layers[1].mixer.qkv.parts)
    for name, got in zip("qkv", (q, k, v), strict=True):
        expected = getattr(theirs.model.layers[1].self_attn, f"{name}_proj").weight.grad
        close(got, expected, f"gradient of {name}", 1e-4)


# ---- rotary scalings, slopes, buckets -------------------------------------------------------------------------------

SCALINGS: list[tuple[RopeScaling, dict[str, Any]]] = [
    (Linear(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    (Yarn(factor=8.0, original=256), {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}),
    (
        Yarn(factor=4.0, original=64, fast=8.0, slow=0.5, sharpening=1.0),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "attention_factor": 1.0,
        },
    ),
    (
        Llama3(factor=8.0, original=64),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
]


@pytest.mark.parametrize(("scaling", "options"), SCALINGS, ids=lambda x: x["rope_type"] if isinstance(x, dict) else "")
def test_rotary_scalings(scaling: RopeScaling, options: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 512}
    config = hf.LlamaConfig(**sizes, rope_parameters={"rope_theta": 1000.0, **options})
    rates, sharpen = ROPE_INIT_FUNCTIONS[options["rope_type"]](config, torch.device("cpu"))
    brick = Rope(theta=1000.0, scaling=scaling).build(2, 16, causal=True)
    x = torch.zeros(1, 1, 1, 16, dtype=torch.float64)
    x[..., :8] = 1.0
    for p in (1, 2, 37):
        turned = brick.rotate(x, Span(p, 1))[0, 0, 0]
        angle = p * rates.double()
        close(turned, torch.cat([angle.cos(), angle.sin()]) * sharpen, f"position {p}", 3e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_slopes(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
    close(torch.tensor(alibi_slopes(heads), dtype=torch.float64), theirs, "slopes", 1e-7)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20)])
def test_t5_buckets(buckets: int, far: int, causal: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    before = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(-before, not causal, buckets, far)
    brick: Any = T5Bias(buckets=buckets, max_distance=far).build(H, 4, causal=causal)
    assert torch.equal(brick.bucket(before[None, None])[0, 0], theirs)


# ---- encoder --------------------------------------------------------------------------------------------------------


def encoder_layer(
    attention: str, *, cross: str | None = None, fc: tuple[str, str], norms: tuple[str, ...]
) -> dict[str, Any]:
    """A post-norm layer of BERT's and BART's kind; attention: where q, k, v and the output projection are named."""
    q, k, v, out = attention.split()
    table = {
        **{f"mixer.qkv.{kind}": cat(*(f"{name}.{kind}" for name in (q, k, v))) for kind in ("weight", "bias")},
        **linear("mixer.out", out),
        **linear("ffn.into", fc[0]),
        **linear("ffn.out", fc[1]),
        **linear("around_mixer.after", norms[0]),
        **linear("around_ffn.after", norms[-1]),
    }
    if cross is not None:
        q, k, v, out = cross.split()
        table |= {
            **linear("cross.q", q),
            **{f"cross.kv.{kind}": cat(f"{k}.{kind}", f"{v}.{kind}") for kind in ("weight", "bias")},
            **linear("cross.out", out),
            **linear("around_cross.after", norms[1]),
        }
    return table


def test_bert() -> None:
    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H}
    theirs = built(hf.BertModel, **sizes, intermediate_size=F, max_position_embeddings=32, layer_norm_eps=1e-12)
    norm = LayerNorm(eps=1e-12)
    layer = Layer(Attention(H, mask=FULL, bias=True), MLP(F, activation="gelu"), norm=norm, place="post")
    mine = Encoder(V, D, pattern([layer], L), embed=Embed(position=Learned(32), norm=norm)).build().double()
    w = Theirs(theirs)
    state = {
        "embed.tokens.weight": w("embeddings.word_embeddings.weight"),
        # every token is of type 0: its vector goes into the table of positions
        "embed.position.table.weight": w("embeddings.position_embeddings.weight")
        + w("embeddings.token_type_embeddings.weight")[0],
        **parts("", w, linear("embed.norm", "embeddings.LayerNorm")),
    }
    table = encoder_layer(
        "attention.self.query attention.self.key attention.self.value attention.output.dense",
        fc=("intermediate.dense", "output.dense"),
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
    )
    for i in range(L):
        state |= parts(f"stack.layers.{i}.", w.below(f"encoder.layer.{i}"), table)
    mine.load_state_dict(state, strict=True)
    ids = ids_of()
    with torch.no_grad():
        close(mine(ids), theirs(ids).last_hidden_state, "full", EXACT)
        for valid in (LEFT, RIGHT):
            at = Span.of(ids, valid=valid)
            assert at.pos is not None
            told = at.pos.masked_fill(at.pos == EMPTY, 0)
            expected = theirs(ids, attention_mask=valid.long(), position_ids=told).last_hidden_state
            close(mine(ids, valid)[valid], expected[valid], "padded", EXACT)


# ---- encoder-decoders -----------------------------------------------------------------------------------------------


def both_sides(mine: Any, theirs: Any, start: str, tolerance: float = EXACT) -> None:
    """Logits with and without a padded source, and ours with a cache."""
    src, tgt = ids_of(seed=1), ids_of(tokens=6)
    with torch.no_grad():
        close(mine(src, tgt), theirs(input_ids=src, decoder_input_ids=tgt).logits, f"{start}: full", tolerance)
        expected = theirs(input_ids=src, attention_mask=RIGHT.long(), decoder_input_ids=tgt).logits
        close(mine(src, tgt, RIGHT), expected, f"{start}: padded source", tolerance)
        state, memory = mine.init_state(2, 6), mine.encode(src, RIGHT)
        steps = [mine.decode(tgt[:, i : i + 1], memory if i == 0 else None, state=state) for i in range(6)]
        close(torch.cat(steps, 1), expected, f"{start}: cached", tolerance)


BART_SIZES = {
    "vocab_size": V,
    "d_model": D,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", L), ("attention_heads", H))},
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "max_position_embeddings": 32,
    "scale_embedding": True,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


def bart_like(theirs: Any, embed: Embed, activation: str, extra: Callable[[str, Theirs], dict[str, Tensor]]) -> Any:
    """BART and Marian: post-norm, everything with a bias, one table for source, target and head."""

    def layer(cross: bool) -> Layer:
        attention = Attention(H, mask=Mask(causal=cross), bias=True)
        return Layer(
            attention,
            MLP(F, activation=activation),  # type: ignore[arg-type]
            cross=Cross(H, bias=True) if cross else None,
            norm=LayerNorm(),
            place="post",
        )

    spec = EncoderDecoder(
        Encoder(V, D, pattern([layer(False)], L), embed=embed),
        Decoder(V, D, pattern([layer(True)], L), embed=embed),
        shared=True,
    )
    mine, w = spec.build().double().eval(), Theirs(theirs)
    state = {"decoder.head.project.weight": w("model.shared.weight")}
    for side in ("encoder", "decoder"):
        crossing = side == "decoder"
        table = encoder_layer(
            " ".join(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")),
            cross=" ".join(f"encoder_attn.{n}_proj" for n in ("q", "k", "v", "out")) if crossing else None,
            fc=("fc1", "fc2"),
            norms=("self_attn_layer_norm", *(["encoder_attn_layer_norm"] if crossing else []), "final_layer_norm"),
        )
        state[f"{side}.embed.tokens.weight"] = w("model.shared.weight")
        state |= extra(side, w.below(f"model.{side}"))
        for i in range(L):
            state |= parts(f"{side}.stack.layers.{i}.", w.below(f"model.{side}.layers.{i}"), table)
    mine.load_state_dict(state, strict=True)
    return mine


def test_bart() -> None:
    theirs = built(hf.BartForConditionalGeneration, **BART_SIZES, activation_function="gelu")

    def extra(side: str, w: Theirs) -> dict[str, Tensor]:
        table = w("embed_positions.weight")[2:]  # they keep two rows for themselves
        return {
            f"{side}.embed.position.table.weight": table,
            **parts(f"{side}.", w, linear("embed.norm", "layernorm_embedding")),
        }

    mine = bart_like(theirs, Embed(position=Learned(32), scaled=True, norm=LayerNorm()), "gelu", extra)
    both_sides(mine, theirs, "BART")


def test_marian() -> None:
    """The Transformer of 2017 as it is used; their table has all sines first, ours alternates: ours is reordered."""
    theirs = built(hf.MarianMTModel, **BART_SIZES, activation_function="swish")
    mine = bart_like(theirs, Embed(position=Sinusoid(32), scaled=True), "silu", lambda side, w: {})
    for side in ("encoder", "decoder"):
        table = theirs.get_submodule(f"model.{side}.embed_positions").weight.data
        theirs.get_submodule(f"model.{side}.embed_positions").weight.data = fixed = _marian_table(table)
        position = mine.get_submodule(f"{side}.embed.position")
        ordered = torch.cat([position.table[:, 0::2], position.table[:, 1::2]], 1)
        close(ordered, fixed, "sines, then cosines", 1e-6)
        position.table = fixed
    both_sides(mine, theirs, "Marian")


def _marian_table(shaken: Tensor) -> Tensor:
    """Their fixed table again (`built` shook it): sin in the left half, cos in the right."""
    rows, width = shaken.shape
    angle = torch.tensor([[p / 10_000 ** (2 * i / width) for i in range(width // 2)] for p in range(rows)])
    return torch.cat([angle.double().sin(), angle.double().cos()], 1)


def test_t5() -> None:
    """T5 1.1: relative bias of the first layer shared by all, no scale, RMSNorm, GEGLU, an untied head."""
    theirs = built(
        hf.T5ForConditionalGeneration,
        vocab_size=V,
        d_model=D,
        d_kv=6,
        d_ff=F,
        num_layers=L,
        num_decoder_layers=L,
        num_heads=H,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    bias = T5Bias(buckets=8, max_distance=20)

    def layer(cross: bool) -> Layer:
        return Layer(
            Attention(H, head_dim=6, scale=1.0, position=bias, mask=Mask(causal=cross)),
            GLU(F, activation="gelu_tanh"),
            cross=Cross(H, head_dim=6, scale=1.0) if cross else None,
            norm=RMSNorm(1e-6),
        )

    spec = EncoderDecoder(
        Encoder(V, D, pattern([layer(False)], L)),
        Decoder(V, D, pattern([layer(True)], L), head=Head(tied=False)),
        shared=True,
    )
    mine, w = spec.build().double().eval(), Theirs(theirs)
    state = {"decoder.head.project.weight": w("lm_head.weight")}
    for side in ("encoder", "decoder"):
        ffn = 2 if side == "decoder" else 1
        table: dict[str, Any] = {
            "mixer.qkv.weight": cat(*(f"layer.0.SelfAttention.{n}.weight" for n in "qkv")),
            "mixer.out.weight": "layer.0.SelfAttention.o.weight",
            "around_mixer.into.weight": "layer.0.layer_norm.weight",
            "ffn.gate_up.weight": cat(*(f"layer.{ffn}.DenseReluDense.wi_{i}.weight" for i in (0, 1))),
            "ffn.out.weight": f"layer.{ffn}.DenseReluDense.wo.weight",
            "around_ffn.into.weight": f"layer.{ffn}.layer_norm.weight",
        }
        if side == "decoder":
            table |= {
                "cross.q.weight": "layer.1.EncDecAttention.q.weight",
                "cross.kv.weight": cat(*(f"layer.1.EncDecAttention.{n}.weight" for n in "kv")),
                "cross.out.weight": "layer.1.EncDecAttention.o.weight",
                "around_cross.into.weight": "layer.1.layer_norm.weight",
            }
        shared = w(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        state[f"{side}.embed.tokens.weight"] = w("shared.weight")
        state[f"{side}.stack.norm.weight"] = w(f"{side}.final_layer_norm.weight")
        for i in range(L):
            state |= parts(f"{side}.stack.layers.{i}.", w.below(f"{side}.block.{i}"), table)
            state[f"{side}.stack.layers.{i}.mixer.position.table.weight"] = shared
    mine.load_state_dict(state, strict=True)
    both_sides(mine, theirs, "T5", 5 * NEAR)
    assert math.isclose(mine.decoder.stack.layers[0].mixer.attend.scale, 1.0)
