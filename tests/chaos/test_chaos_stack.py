"""Search of the services' logs for tracebacks and broken rules."""

from pathlib import Path

from benchmarks.chaos.stack import complaints

_LOG = """\
2026-01-14T10:00:00Z [info     ] listening                      service=scheduler
2026-01-14T10:00:01Z [error    ] Exception in callback          service=scheduler
Traceback (most recent call last):
  File "scheduler.py", line 80, in _run
    self._callback()
AssertionError: twice
2026-01-14T10:00:02Z [warning  ] worker left   reason='step 4, row 7: no such row (rule: rows)'
2026-01-14T10:00:03Z [info     ] leading
"""


def test_tracebacks_and_broken_rules_are_found(tmp_path: Path):
    log = tmp_path / "scheduler.log"
    log.write_text(_LOG)
    error, rule = complaints(log)
    assert error == "AssertionError: twice"
    assert "(rule: rows)" in rule


def test_a_truncated_traceback_is_found(tmp_path: Path):
    log = tmp_path / "scheduler.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1\n')
    [error] = complaints(log)
    assert error.startswith("Traceback")
