"""The errors of aotdist: one base class, few kinds, one form of message.

A message has what happened and to which tensor, the line of the user's program, the stage that noticed, and
a fix::

    UnsupportedProgram: `x.item()` needs the value of a tensor while the program is being captured
      at model.py:88   if loss.item() > 3:      stage: capture
      fix: keep it a tensor (`torch.where`), or move the branch out of the compiled function
"""

from __future__ import annotations


class AotdistError(RuntimeError):
    """Base of every error that aotdist raises on purpose.

    It is a `RuntimeError`, as PyTorch's errors for the same reasons are, so that code which catches those
    catches ours.

    Args:
        what: the fault in one sentence, with the name of the tensor (`blocks.3.scale`) if there is one.
        where: the user's source line as `file:line   code`, if it is known.
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
        """Add another way out to `fix`."""
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
    """Raised in a trace, through user code that catches every `Exception`; it is no interrupt."""


class UnsupportedProgram(AotdistError):
    """The user's program does something that cannot be compiled ahead of time."""


class BadSettings(AotdistError):
    """A setting, an argument or the environment is wrong; nothing was compiled."""


class SignatureMismatch(AotdistError):
    """A call does not fit the artifact that was loaded for it, and may not be compiled."""


class RankDivergence(AotdistError):
    """The ranks of a process group are about to run different sequences of collectives."""


class RankLost(AotdistError):
    """A rank of a process group stopped answering while the others waited for it."""


class CacheCorrupt(AotdistError):
    """A cache entry is damaged: a warning at a call, an error in `aotdist cache verify`."""


class BadArtifact(AotdistError):
    """An artifact's file cannot be used: it is damaged, of other versions, or for another machine."""


class IndexOutOfBounds(AotdistError, IndexError):
    """An index, or a label, is out of bounds of its dimension: an `IndexError`, as in eager."""


class InternalError(AotdistError):
    """A bug in aotdist: a stage broke its promise."""
