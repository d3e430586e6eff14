"""The plugin for pytest, found by its entry point: one fixture, nothing imported until a test asks for it.

def test_my_model(transformer_doctor):
    transformer_doctor.check(MyModel(), kind="decoder", pad=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from brickformer.doctor.report import Report


class TransformerDoctor:
    """Checks models; `allow` names probes whose findings are known and accepted."""

    def diagnose(self, model: Any, **said: Any) -> Report:
        """The report. said: fields of Subject, and seconds."""
        from brickformer.doctor.examination import diagnose

        return diagnose(model, **said)

    def check(self, model: Any, *, allow: tuple[str, ...] | list[str] = (), notes: bool = False, **said: Any) -> Report:
        """Fails the test when something is wrong. notes: whether a note fails as well."""
        __tracebackhide__ = True
        report = self.diagnose(model, **said)
        counted = report.findings if notes else report.wrong
        if [f for f in counted if f.probe not in allow]:
            pytest.fail(str(report), pytrace=False)
        return report


@pytest.fixture(scope="session")
def transformer_doctor() -> TransformerDoctor:
    """The doctor of brickformer: `transformer_doctor.check(model)`."""
    return TransformerDoctor()
