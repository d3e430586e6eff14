"""The doctor itself: the patient is left as it was, bad input is a sentence, the command line has its exit codes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from brickformer import gpt2
from brickformer.cli import main
from brickformer.doctor import Subject, diagnose
from brickformer.doctor.mutants.bug import module_of, text_of
from brickformer.doctor.subject import wants
from brickformer.errors import BrickError
from brickformer.mask import Span


def test_the_caller_is_not_disturbed() -> None:
    """Weights, buffers, modes, gradients and random numbers are afterwards what they were."""
    model = module_of("decoder").make()
    model.blocks[0].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    drawn = (torch.rand(3), random.random())
    torch.manual_seed(5)
    random.seed(5)
    diagnose(model)
    after = (torch.rand(3), random.random())
    assert torch.equal(drawn[0], after[0]) and drawn[1] == after[1]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_twins_keep_their_modes() -> None:
    module = module_of("loop")
    twins = module.twins()
    twins["int8"].train().layers[0].eval()
    before = [m.training for m in twins["int8"].modules()]
    diagnose(Subject(module.make_outliers(), twins=twins))
    assert [m.training for m in twins["int8"].modules()] == before


def test_what_must_be_given_is_wanted() -> None:
    assert wants(lambda model, ids, y: 0, 3) and wants(lambda model, ids, labels=None: 0, 3)
    assert not wants(lambda model, ids, smoothing=0.0: 0, 3)
    assert not wants(lambda model, ids, new, temperature=1.0, valid=None: 0, 4)
    assert wants(lambda model, ids, new=20, attention_mask=None: 0, 4)


def test_a_model_of_ours_that_counts_padding() -> None:
    model = gpt2(vocab=40, dim=32, depth=2, heads=4, max_len=32).build()

    class FromTheEdge(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, at: Span) -> torch.Tensor:
            return self.inner(x, replace(at, pos=None))

    model.embed.position = FromTheEdge(model.embed.position)
    report = diagnose(model)
    assert report.probes == ("left padding",), str(report)


def test_what_it_cannot_work_out_it_asks_for() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, x: torch.Tensor, graph: object) -> torch.Tensor:
            return self.embed(x)

    with pytest.raises(BrickError, match=r"Strange.forward needs graph, .*Subject\(model, call="):
        diagnose(Strange())
    with pytest.raises(BrickError, match="got int; expected"):
        diagnose(3)  # type: ignore[arg-type]


def test_one_that_always_raises() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no memory of that")

    with pytest.raises(BrickError, match=r"Raises could not be called \(RuntimeError: no memory of that\)"):
        diagnose(Raises())


def test_one_token_alone() -> None:
    """A squeeze that takes the axis of time."""
    other = module_of("encoder", ("        return x\n\n\nclass TextC", "        return x.squeeze(1)\n\n\nclass TextC"))
    assert "length" in diagnose(other.make()).probes


def test_what_cannot_be_learnt() -> None:
    """Logits that cannot grow: nothing else is wrong to see."""
    module = module_of(
        "rotary",
        ("return self.lm_head(self.norm(x)), kept", "return self.lm_head(self.norm(x)) * 1e-3, kept"),
    )
    assert "overfit" in diagnose(module.make()).probes


def test_half_precision() -> None:
    module = module_of("encoder", ("scores = torch.einsum", "scores = q.new_tensor(7e4) * 0 + torch.einsum"))
    assert "precision" in {f.probe for f in diagnose(module.make()).findings}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    text = text_of("decoder")
    (tmp_path / "healthy.py").write_text(text)
    fill = 'att.masked_fill(~self.tril[:T, :T], float("-inf"))'
    (tmp_path / "sick.py").write_text(text.replace(fill, "att.masked_fill(~self.tril[:T, :T], 0.0)"))
    (tmp_path / "raises.py").write_text("def make():\n    raise OSError('no weights')\n\ndef number():\n    return 3\n")
    return tmp_path


def test_exit_codes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{files}/healthy.py:make"]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    assert main(["doctor", f"{files}/sick.py:make"]) == 1
    said = capsys.readouterr().out
    assert "ERROR  mask value  at blocks.0.attn" in said and "also" in said and "1 finding" in said
    assert main(["doctor", f"{files}/sick.py:make", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False and data["findings"][0]["probe"] == "mask value"
    assert {p["outcome"] for p in data["probes"]} <= {"healthy", "found", "not owed", "untested"}


def test_the_session_in_the_documents_is_real(
    files: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (files / "sick.py").rename(files / "my_gpt.py")
    monkeypatch.chdir(files)
    main(["doctor", "my_gpt.py:make"])
    assert f"$ brick doctor my_gpt.py:make\n{capsys.readouterr().out}```" in (root / "docs/doctor.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("none.py:make", "no such file"),
        ("healthy.py", "expected FILE.py:FUNCTION"),
        ("healthy.py:mke", "did you mean 'make'"),
        ("raises.py:make", "make() raised OSError: no weights"),
        ("raises.py:number", "returned int; expected a model"),
    ],
)
def test_bad_input(files: Path, what: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{files}/{what}"]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) <= 2


def test_encode_and_decode_in_place_of_a_forward() -> None:
    changes = (
        ("    def forward(self, src, trg):\n", "    def encode(self, src):\n"),
        ("        src_mask, trg_mask = self.make_src_mask(src), self.make_trg_mask(trg)\n", ""),
        ("memory = self.encoder(src, src_mask)", "return self.encoder(src, self.make_src_mask(src))\n"),
        (
            "return self.decoder(trg, memory, trg_mask, src_mask)",
            "\n    def decode(self, trg, memory):\n"
            "        return self.decoder(trg, memory, self.make_trg_mask(trg), torch.ones(1, 1, 1, 1).bool())",
        ),
    )
    report = diagnose(module_of("seq2seq", *changes).make())
    assert "encoder-decoder" in report.facts
    assert report.probes == ("padding",), str(report)  # of the source, in cross-attention


def test_neither_forward_nor_decode() -> None:
    with pytest.raises(BrickError, match="Sequence has no forward"):
        diagnose(type("Sequence", (nn.Module,), {})())


def test_a_subject_says_how_it_is_called() -> None:
    model = module_of("encoder").make()
    report = diagnose(Subject(model, kind="encoder", vocab=41, call=lambda m, ids, valid: m(ids, valid)))
    assert report.ok, str(report)
