# SPDX-License-Identifier: Apache-2.0
"""Errors of the kernel room.

    KernelError
      NoKernelFoundError   no_kernel_found   nothing registered can run this call (LookupError)
      KernelInputError     kernel_input      an argument is wrong (ValueError)
      KernelConflictError  kernel_conflict   a name is registered twice (ValueError)

Does not know: who catches them, or HTTP.
"""

from __future__ import annotations


class KernelError(Exception):
    """Root of the room; `code` is stable."""

    code = "kernel_error"


class NoKernelFoundError(KernelError, LookupError):
    """No registered kernel of the family can run the call; the text lists every reason."""

    code = "no_kernel_found"


class KernelInputError(KernelError, ValueError):
    """An argument is wrong: names the field, the value, and what is allowed."""

    code = "kernel_input"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {value}; allowed: {allowed}")
        self.field = field

    @classmethod
    def of_extension(cls, error: ValueError) -> KernelInputError:
        """Return the same complaint as the compiled code made ("field: got x; allowed: y")."""
        found = cls.__new__(cls, str(error))
        ValueError.__init__(found, str(error))
        found.field = str(error).partition(":")[0]
        return found


class KernelConflictError(KernelError, ValueError):
    """Two kernels of one family carry the same name."""

    code = "kernel_conflict"
