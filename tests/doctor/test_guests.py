"""Strangers' models: what they keep, how they count their ids, where their files lie, what does not come to an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from brickformer.cli import main
from brickformer.doctor import Subject, adapter, diagnose
from brickformer.doctor.guard import OutOfTime, duplicate, interrupted
from brickformer.doctor.mutants.bug import module_of, text_of
from brickformer.doctor.signature import read_signature
from brickformer.errors import BrickError


class Kept(nn.Module):
    """Keeps what it computed, as people do who want to draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.map: torch.Tensor | None = None
        self.maps: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.map = self.linear(x)
        self.maps = [self.map * 2]
        return self.map


def test_what_is_kept_of_the_last_run_does_not_hinder_a_copy() -> None:
    model = Kept()
    model(torch.ones(1, 3))
    other = duplicate(model)
    assert torch.equal(other.map, model.map) and not other.map.requires_grad  # type: ignore[union-attr, arg-type]
    assert torch.equal(other.maps[0], model.maps[0])  # type: ignore[index, arg-type]
    assert other.linear.weight is not model.linear.weight and other.linear.weight.requires_grad  # type: ignore[union-attr]
    assert model.map is not None and model.map.requires_grad


class Counted(nn.Module):
    """Knows 23 ids by a table that is no nn.Embedding."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(8, 11)
        self.table = nn.Parameter(torch.randn(23, 8))
        self.places = nn.Parameter(torch.randn(16, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "index":
                x = self.table[ids]
            case "one-hot":
                x = F.one_hot(ids, 23).to(self.table) @ self.table
            case _:
                x = torch.stack([self.table.detach() for _ in range(1)]).expand(len(ids), -1, -1)
                x = x.gather(1, ids[..., None].expand(-1, -1, 8)) * self.table.sum(0)
        return self.head((x + self.places[: ids.shape[1]]).cumsum(1))


@pytest.mark.parametrize("how", ["index", "one-hot"])
def test_ids_are_counted_by_any_table(how: str) -> None:
    assert "23 ids" in diagnose(Counted(how), kind="decoder").facts


def test_who_reads_no_table_is_asked_or_has_as_many_ids_as_features() -> None:
    assert "11 ids" in diagnose(Counted("gather"), kind="decoder").facts

    class Sign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            assert ids.dtype == torch.long
            return self.linear(ids[..., None].to(self.linear.weight)).cumsum(1)

    with pytest.raises(BrickError, match=r"how many ids .*Subject\(model, vocab=\.\.\.\)"):
        diagnose(Sign())


def test_names_of_arguments() -> None:
    def forward(x: Any, lengths: Any, masked_lm_labels: Any = None, prefix_len: int = 0) -> None: ...

    roles = read_signature(forward).roles
    assert roles == {"x": "ids", "lengths": "mask", "masked_lm_labels": "other", "prefix_len": "other"}


def test_arguments_without_names() -> None:
    inner = module_of("heads").make()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = inner

        def forward(self, *inputs: Any, **more: Any) -> Any:
            return self.module(*inputs, **more)

    class Placed(Wrapped):
        def forward(self, ids: torch.Tensor, /) -> Any:  # type: ignore[override]
            return self.module(ids)

    for model in (Wrapped(), Placed()):
        report = diagnose(model, kind="decoder", pad=0)
        assert report.ok and "46 ids" in report.facts, str(report)


def test_a_smoothed_loss_may_be_below_ln_v() -> None:
    """Its floor is what equal probabilities cost: ln V - H(smoothed)."""

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        logp = model(ids)[0][:, :-1].log_softmax(-1)
        wanted = torch.full_like(logp, 0.1 / 40).scatter(-1, ids[:, 1:, None], 0.9)
        return F.kl_div(logp, wanted, reduction="none").sum(-1).mean()

    report = diagnose(Subject(module_of("rotary").make(), loss=loss))
    assert report.ok, str(report)


def test_one_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "MOST", 1000)
    with pytest.raises(BrickError, match="parameters; it would be copied"):
        diagnose(module_of("heads").make())


def test_an_endless_loop_is_left() -> None:
    with pytest.raises(OutOfTime, match="enough"), interrupted(0.05, "enough"):
        while True:
            pass


def test_a_call_that_does_not_end_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "endless.py").write_text("while True: pass\n")
    assert main(["doctor", f"{tmp_path}/endless.py:make", "--seconds", "0.2"]) == 2
    assert "importing the file did not end" in capsys.readouterr().err
    text = text_of("heads").replace("        B, T = idx.shape\n", "        while True: pass\n")
    (tmp_path / "stuck.py").write_text(text)
    assert main(["doctor", f"{tmp_path}/stuck.py:make", "--seconds", "0.2"]) == 2
    assert "stuck.py:make" in (said := capsys.readouterr().err) or "PadLM" in said


def test_a_file_in_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "nets").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "nets" / "__init__.py").write_text("")
    (tmp_path / "mine" / "sizes.py").write_text("HEADS = 4\n")
    text = text_of("heads").replace("import torch\n", "import torch\nfrom ..sizes import HEADS\n", 1)
    (tmp_path / "mine" / "nets" / "net.py").write_text("\ufeff" + text.replace("h=4", "h=HEADS"), "utf-8")
    assert main(["doctor", f"{tmp_path}/mine/nets/net.py:make"]) == 0
    assert "nothing wrong" in capsys.readouterr().out


def test_one_that_leaves_and_one_that_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    assert main(["doctor", f"{tmp_path}/leaves.py:make"]) == 2
    assert "line 2: SystemExit: 3. What runs when it is imported" in capsys.readouterr().err
    text = text_of("heads").replace("def make():\n", "print('imported')\n\n\ndef make():\n    print('made')\n")
    (tmp_path / "prints.py").write_text(text)
    assert main(["doctor", f"{tmp_path}/prints.py:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise SystemExit(1)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.LazyLinear(20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(ids))
        return out


@pytest.mark.parametrize(("made", "says"), [(Leaves, "SystemExit: 1"), (Lazy, "lazy parameters")])
def test_models_that_leave_or_are_not_made_yet(made: type[nn.Module], says: str) -> None:
    with pytest.raises(BrickError, match=says):
        diagnose(made())
