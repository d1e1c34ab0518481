"""Compile functions that LLVM inlines into the loops that call them: these need no machine code of their own.

Numba would make some for each, and wrappers for Python and C, for calls that never come: a fifth of the time
to compile all that a run needs. It optimizes them by themselves, too. Without that it takes a third less, but
loops are 1 % slower and round otherwise.
"""

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, to be linked into that of its callers and nowhere else.

    Should a later Numba call these methods by other names, all is as with other functions: it takes longer.
    """

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # whoever holds addresses of this process is not kept on disk
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is none

    @property
    def codegen(self) -> object:
        return self  # for `set_env` alone

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing: this tells the code where objects of Python are, of which loops hold none."""


class InlinedCompiler(Compiler):  # type: ignore[misc]
    """Numba's pipeline, with such a library."""

    def define_pipelines(self) -> object:
        self.state.library = _Library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()
