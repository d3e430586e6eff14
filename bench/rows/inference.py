"""Rows about use: dropout left on, the cache, fused attention, Mamba against attention."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial

import torch
from common import figure, log_scale, table
from torch import Tensor

from brickformer import MLP, Attention, Decoder, EncoderDecoderModel, Layer, Rope, Span, pattern
from brickformer.attend import Attend
from brickformer.mask import CAUSAL
from brickformer.mixers.mamba import Mamba
from rows.learning import trained
from rows.row import BLUE, RED, Row, keep, ms


@torch.no_grad()
def answered(model: EncoderDecoderModel, src: Tensor, valid: Tensor | None, bos: int, most: int) -> Tensor:
    """Greedy answers, the model in whatever mode it is."""
    memory, ids = model.encode(src, valid), torch.full((len(src), 1), bos)
    for _ in range(most):
        ids = torch.cat([ids, model.decode(ids, memory)[:, -1:].argmax(-1)], 1)
    return ids[:, 1:]


def dropout() -> Row:
    """Dropout left on while answering."""
    found = trained(200, dropout=0.1)
    model, data = found.model, found.data
    assert isinstance(model, EncoderDecoderModel) and data.target.bos is not None
    differ, right, total = 0, {True: 0, False: 0}, 0
    for batch in data.validation(100):
        assert batch.src is not None
        for training in (True, False):
            model.train(training)
            first, second = (
                answered(model, batch.src, batch.src_valid, data.target.bos, batch.targets.shape[1]) for _ in "ab"
            )
            counts = batch.targets != -100
            right[training] += int(((first == batch.targets) | ~counts).all(1).sum())
            if training:
                differ += int(((first != second) & counts).any(1).sum())
            else:
                assert torch.equal(first, second), "eval() is deterministic"
        total += len(batch.src)
    model.eval()
    return Row(
        "Dropout left on",
        "forgetting eval() makes every answer different",
        f"two answers to the same question differ in {differ / total:.1%} of {total} cases; {right[True] / total:.1%} are "
        f"right instead of {right[False] / total:.1%}",
        "in part",
        "The digit task with dropout of 0.1, trained for 200 steps, greedy, each question twice.",
        "A model that is sure stays right under most masks of dropout, so the bug shows as a few wrong answers that do not "
        "come again, which is worse to find. Generation here is always in eval mode.",
    )


def cache() -> Row:
    """A token with and without the cache."""
    layer = Layer(Attention(heads=8, position=Rope()), MLP(2048))
    model = Decoder(1000, 512, pattern([layer], 6)).build().eval()
    rows, lengths, kept, again = [], [10, 25, 50, 100, 200], [], []
    for n in lengths:
        ids = torch.randint(1000, (1, n))
        state = model.init_state(1, n + 1)
        with torch.inference_mode():
            model(ids[:, :-1], None, state)

            def one(state: object = state, ids: Tensor = ids, n: int = n) -> None:
                with torch.inference_mode():
                    model(ids[:, -1:], None, state)  # type: ignore[arg-type]
                    state.rewind(n - 1)  # type: ignore[attr-defined]

            def whole(ids: Tensor = ids) -> None:
                with torch.inference_mode():
                    model.logits(model.hidden(ids)[:, -1:])

            kept.append(ms(one, 15, 3))
            again.append(ms(whole, 9, 2))
        rows.append((n, f"{again[-1]:.1f}", f"{kept[-1]:.1f}", f"{again[-1] / kept[-1]:.1f} ×"))
    made, (ax,) = figure(7.2, 3.4)
    ax.plot(lengths, again, "o-", color=RED, label="everything again")
    ax.plot(lengths, kept, "o-", color=BLUE, label="with the cache")
    ax.set(xlabel="length of the text (tokens)", ylabel="ms a token", ylim=(0, None))
    ax.legend(frameon=False)
    keep("cache", made)
    ratio = again[2] / kept[2]
    three = next((n for n, a, k in zip(lengths, again, kept, strict=True) if a > 3 * k), None)
    return Row(
        "The key-value cache",
        "at length 50 a token takes 12 ms instead of 40, more than three times as fast, and more with more",
        f"at length 50 a token takes {kept[2]:.1f} ms instead of {again[2]:.1f} ({ratio:.1f} ×), at 200 {kept[4]:.1f} instead "
        f"of {again[4]:.1f} ({again[4] / kept[4]:.1f} ×)",
        "agrees" if ratio > 3 else "in part",
        "A decoder of six layers, D = 512, feed-forward 2048, one text on a CPU; the middle of several calls.",
        "More with more, as said; how many times depends on the machine"
        + (f", here more than three from {three} tokens on." if three else "."),
        table(("tokens", "ms a token, everything again", "ms a token, cached", "times"), rows),
    )


def measured(backend: str, tokens: int) -> tuple[float, float]:
    """(ms, MB above what was held before) of one attention in a process of its own."""
    code = f"from rows.inference import alone; alone({backend!r}, {tokens})"
    done = subprocess.run([sys.executable, "-c", code], cwd=sys.path[0], capture_output=True, text=True, check=True)
    time, memory = map(float, done.stdout.split()[-2:])
    return time, memory


def alone(backend: str, tokens: int) -> None:
    """Called by `measured`."""
    attend = Attend(CAUSAL, backend=backend)  # type: ignore[arg-type]
    at = Span(0, tokens)
    small = torch.randn(1, 8, 64, 64)
    q, k, v = torch.randn(3, 1, 8, tokens, 64)
    with torch.inference_mode():
        attend(small, small, small, Span(0, 64), Span(0, 64))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend(q, k, v, at, at)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(ms(partial(attend, q, k, v, at, at), 3, 0), held / 1000)


def sdpa() -> Row:
    """The fused kernel."""
    rows, lengths = [], [512, 1024, 2048, 4096]
    found = {n: {b: measured(b, n) for b in ("reference", "sdpa")} for n in lengths}
    for n, f in found.items():
        (t0, m0), (t1, m1) = f["reference"], f["sdpa"]
        rows.append((n, f"{t0:.0f}", f"{t1:.0f}", f"{m0:.0f}", f"{m1:.0f}"))
    (t0, m0), (t1, m1) = found[4096]["reference"], found[4096]["sdpa"]
    one = 8 * 4096**2 * 4 / 1e6
    made, axes = figure(9.0, 3.4, columns=2)
    for ax, i, label in ((axes[0], 0, "ms"), (axes[1], 1, "MB more than before")):
        ax.plot(lengths, [max(1.0, found[n]["reference"][i]) for n in lengths], "o-", color=RED, label="written out")
        ax.plot(lengths, [max(1.0, found[n]["sdpa"][i]) for n in lengths], "o-", color=BLUE, label="fused")
        log_scale(ax.xaxis)
        log_scale(ax.yaxis)
        ax.set(xlabel="tokens", ylabel=label)
    axes[0].legend(frameon=False)
    keep("sdpa", made)
    return Row(
        "Fused attention",
        "scaled_dot_product_attention takes 60 % less memory for the same input, and less time",
        f"at 4096 tokens {'less than 10' if m1 < 10 else f'{m1:.0f}'} MB instead of {m0:.0f} ({1 - max(m1, 10) / m0:.0%} less) and {t1:.0f} ms instead of {t0:.0f}",
        "agrees" if m1 < 0.5 * m0 and t1 < t0 else "in part",
        "One causal attention of 8 heads of width 64 on a CPU, each in a process of its own; memory by which the "
        "call raised the peak of its process, so that a few MB show as 0.",
        f"Measured is attention alone: one map of 8 × 4096 × 4096 is {one:.0f} MB, and written out it takes {m0 / one:.1f} times "
        "that; the fused kernel writes none. In a whole model the share is smaller, the rest being the same.",
        table(("tokens", "ms, written out", "ms, fused", "MB, written out", "MB, fused"), rows),
    )


def mamba() -> Row:
    """Time over length."""
    torch.manual_seed(0)
    mixers = {"attention": Attention(heads=4, position=Rope()).build(256), "Mamba": Mamba().build(256)}
    lengths, times = [256, 1024, 4096, 8192], {}
    for name, mixer in mixers.items():
        mixer.eval()
        for n in lengths:
            x = torch.randn(1, n, 256)
            with torch.inference_mode():
                times[name, n] = ms(partial(mixer, x, Span(0, n)), 3, 1)
    rows = [(n, f"{times['attention', n]:.0f}", f"{times['Mamba', n]:.0f}") for n in lengths]
    made, (ax,) = figure(7.2, 3.4)
    for (name, _), colour in zip(mixers.items(), (RED, BLUE), strict=True):
        ax.plot(lengths, [times[name, n] for n in lengths], "o-", color=colour, label=name)
    log_scale(ax.xaxis)
    log_scale(ax.yaxis)
    ax.set(xlabel="tokens", ylabel="ms")
    ax.legend(frameon=False)
    keep("mamba", made)
    quicker = next((n for n in lengths if times["Mamba", n] < times["attention", n]), None)
    growth = {name: times[name, 8192] / times[name, 1024] for name in mixers}
    return Row(
        "Linear instead of quadratic",
        "Mamba replaces a cost that grows with the square of the length by a linear one",
        f"from 1024 to 8192 tokens Mamba takes {growth['Mamba']:.0f} × the time, attention {growth['attention']:.0f} ×; at "
        f"8192 tokens {times['Mamba', 8192]:.0f} ms against {times['attention', 8192]:.0f} ms",
        "agrees" if growth["Mamba"] < 0.6 * growth["attention"] else "in part",
        "One mixer of width 256 over one text on a CPU. More: [linear](../bench/results/linear.md).",
        "Linear is not the same as faster: here Mamba is the quicker one "
        + (f"from {quicker} tokens on." if quicker else f"at none of these lengths, up to {lengths[-1]} tokens."),
        table(("tokens", "attention, ms", "Mamba, ms"), rows),
    )
