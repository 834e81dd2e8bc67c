# SPDX-License-Identifier: Apache-2.0
"""A disk that is full below one folder, for processes that are started with a shim before libc."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.preload_shim import build_shim

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int is_full(int fd) {
    char link[64], path[1024];
    if (access(FLAG, F_OK) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strncmp(path, FOLDER, sizeof FOLDER - 1) == 0;
}
#define GUARD(name, ...) \
    if (is_full(fd)) { errno = ENOSPC; return -1; } \
    return ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(fd, __VA_ARGS__);
ssize_t write(int fd, const void *from, size_t n) { GUARD(write, from, n) }
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { GUARD(pwrite, from, n, at) }
ssize_t pwrite64(int fd, const void *from, size_t n, off64_t at) { GUARD(pwrite64, from, n, at) }
ssize_t writev(int fd, const struct iovec *from, int n) { GUARD(writev, from, n) }
ssize_t pwritev(int fd, const struct iovec *from, int n, off_t at) { GUARD(pwritev, from, n, at) }
ssize_t pwritev64(int fd, const struct iovec *from, int n, off64_t at) {
    GUARD(pwritev64, from, n, at)
}
int fallocate(int fd, int mode, off_t at, off_t n) { GUARD(fallocate, mode, at, n) }
"""


class FullDisk:
    """`shim` is for LD_PRELOAD; nothing below `folder` can be written while `flag` is there
    (ENOSPC)."""

    def __init__(self, scratch: Path, folder: Path) -> None:
        self.flag = scratch / "disk_is_full"
        self.shim = build_shim(scratch / "full_disk.so", _SHIM, FLAG=self.flag, FOLDER=f"{folder}/")

    def fill(self) -> None:
        self.flag.touch()

    def make_room(self) -> None:
        self.flag.unlink()
