"""A pytest plugin: the time that the tests of each folder take, and a session that fails when it is too long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


class TimeBudget:
    """Prints the time of each folder, and fails the session if one takes longer than ``budget_s`` allows."""

    def __init__(self, budget_s: Mapping[str, float]) -> None:
        self._budget_s = budget_s
        self._taken_s: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken_s[Path(report.location[0]).parent.as_posix()] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if any(self._is_over(folder) for folder in self._taken_s):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for folder, taken_s in sorted(self._taken_s.items()):
            budget = f" of {self._budget_s[folder]:g} s allowed" if folder in self._budget_s else ""
            over = ": OVER BUDGET, the session fails" if self._is_over(folder) else ""
            terminalreporter.write_line(f"{folder}: {taken_s:.1f} s{budget}{over}", red=bool(over))

    def _is_over(self, folder: str) -> bool:
        return self._taken_s[folder] > self._budget_s.get(folder, float("inf"))
