import io

from quire.launcher.start_display import StartDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_replaced_and_cleared(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    terminal, plain = Terminal(), []
    display = StartDisplay(terminal, plain.append, has_logs=False)
    display.on_wait("worker-0")
    display.on_progress("worker-0 to load the model (downloading)")
    display.on_progress("gateway")
    display.clear()
    display.clear()
    lines = terminal.getvalue().split("\r\x1b[2K")
    assert lines == ["", "Waiting for worker-0 to load ", "Waiting for gateway", ""]
    assert plain == []


def test_elsewhere_and_among_logs_each_action_is_a_line():
    for out, has_logs in ((io.StringIO(), False), (Terminal(), True)):
        plain: list[str] = []
        display = StartDisplay(out, plain.append, has_logs=has_logs)
        display.on_progress("worker-0 to load the model (downloading, 1 MiB of 2 MiB)")
        display.on_wait("worker-0 to load the model (downloading)")
        display.clear()
        assert plain == ["Waiting for worker-0 to load the model (downloading) ..."]
        assert out.getvalue() == ""
