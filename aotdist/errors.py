"""What aotdist raises: one base class, few kinds, one shape of message.

A message is written for the person who meets it: what happened and to which slot, the line of
their program, the stage that noticed, and the way out::

    UnsupportedProgram: `x.item()` needs the value of a tensor while the program is being captured
      at model.py:88   if loss.item() > 3:      stage: capture
      fix: keep it a tensor (`torch.where`), or move the branch out of the compiled function
"""

from __future__ import annotations


class AotdistError(RuntimeError):
    """Base of every error that aotdist raises on purpose.

    It is a `RuntimeError`, as what PyTorch raises for the same reasons is, so code that expects
    PyTorch's finds ours. What tells PyTorch's from ours looks for `AotdistError` first.

    Args:
        what: the fault in one sentence, naming the slot (`blocks.3.scale`) when there is one.
        where: the user's source line as `file:line   code`, when it is known.
        stage: the stage of the pipeline that noticed.
        fix: what the user can do about it.
    """

    def __init__(
        self, what: str, *, where: str | None = None, stage: str | None = None, fix: str | None = None
    ) -> None:
        self.what = what
        self.where = where
        self.stage = stage
        self.fix = fix
        super().__init__(self._render())

    def or_else(self, way_out: str) -> None:
        """Name another way out."""
        self.fix = f"{self.fix}; or {way_out}" if self.fix else way_out
        self.args = (self._render(),)

    def _render(self) -> str:
        lines = [self.what]
        context = "      ".join(
            part
            for part in (
                f"at {self.where}" if self.where else "",
                f"stage: {self.stage}" if self.stage else "",
            )
            if part
        )
        if context:
            lines.append(f"  {context}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class PassesPrograms(BaseException):
    """What a trace raises through programs that catch every `Exception`; it is no interrupt."""


class UnsupportedProgram(AotdistError):
    """The user's program does something that cannot be compiled ahead of time."""


class BadSettings(AotdistError):
    """A setting, an option or the environment is wrong; nothing was compiled."""


class SignatureMismatch(AotdistError):
    """Arguments do not fit what an artifact was compiled for, and it may not be compiled again."""


class RankDivergence(AotdistError):
    """The ranks of a process group are about to run different sequences of collectives."""


class RankLost(AotdistError):
    """A rank of a process group stopped answering while the others waited for it."""


class CacheCorrupt(AotdistError):
    """A cache entry is damaged: a warning at a call, an error of `aotdist cache verify`."""


class BadArtifact(AotdistError):
    """An artifact in a file cannot be used: it is damaged, or made by, or for, something else."""


class IndexOutOfBounds(AotdistError, IndexError):
    """An index, or a label, is none of the dimension that it picks from: an `IndexError`, as in eager."""


class InternalError(AotdistError):
    """A bug of ours: something that an earlier stage promised does not hold."""
