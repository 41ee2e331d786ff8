"""How a process ended, as a value that can be sent, compared and printed."""

import signal

import msgspec


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; real-time signals are named by their offset."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


class WaitStatus(msgspec.Struct, frozen=True):
    """An exit code, or the signal that killed the process, or neither if unknown."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def from_wait(cls, status: int) -> "WaitStatus":
        """Translate the integer of waitpid(2)."""
        if status & 0x7F:
            return cls(signal=status & 0x7F)
        return cls(code=(status >> 8) & 0xFF)

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would report: 128+n for a signal, 1 if unknown."""
        if self.signal is not None:
            return 128 + self.signal
        return 1 if self.code is None else self.code

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        if self.code is None:
            return "exit status unknown"
        return f"exit code {self.code}"
