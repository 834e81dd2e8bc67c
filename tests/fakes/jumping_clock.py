# SPDX-License-Identifier: Apache-2.0
"""A wall clock that jumps, for processes that are started with a shim before libc."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.preload_shim import build_shim

_SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
    char text[32] = {0};
    int file = open(JUMP_FILE, O_RDONLY);
    if (file < 0) return 0;
    long length = read(file, text, sizeof text - 1);
    close(file);
    return length > 0 ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int code = (int)syscall(SYS_clock_gettime, clock, at);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += jump();
    return code;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class JumpingClock:
    """`shim` is for LD_PRELOAD."""

    def __init__(self, scratch: Path) -> None:
        self._file = scratch / "clock_jump_s"
        self.shim = build_shim(scratch / "jumping_clock.so", _SHIM, JUMP_FILE=self._file)

    def jump_to(self, seconds: int) -> None:
        """From now on the wall clock is so many seconds ahead of the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._file)
