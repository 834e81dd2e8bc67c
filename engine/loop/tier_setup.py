# SPDX-License-Identifier: Apache-2.0
"""Builds the lower tiers of one engine from its configuration: pool, store, transfers.

Does not know: the loop, the scheduler, who kept the memory while no engine ran.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.batch import ModelRunner
from engine.execution.memory import free_host_bytes
from engine.loop.tier_report import TierFacts
from kvtiers.device_memory import device_memory
from kvtiers.host_pool import HostPool, PoolShape, kept_slots, shape_within
from kvtiers.keys import ObjectKeys
from kvtiers.layout import KvLayout
from kvtiers.numa import put_near_gpu
from kvtiers.objects import object_bytes
from kvtiers.store import Store
from kvtiers.stores import StoreSpec, open_store
from kvtiers.transfer import TransferEngine

logger = logging.getLogger(__name__)

AUTO_SHARE = 0.25
MOST_AUTO_BYTES = {"cpu": 1 << 30, "cuda": 32 << 30}
MOST_SLOTS = 1 << 16  # of an automatic pool: small pages need no more


@runtime_checkable
class HasKvPool(Protocol):
    """A model runner whose pages can be moved: all of a page lies in one piece."""

    @property
    def kv_pool(self) -> torch.Tensor:
        """[num_pages or more, ...], contiguous."""
        ...

    @property
    def layout(self) -> KvLayout: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTiers:
    """What there is below L1. `transfers` None: nothing, and `facts` say why."""

    transfers: TransferEngine | None
    facts: TierFacts
    num_layers: int = 1  # of a page

    @property
    def num_l2_pages(self) -> int:
        return 0 if self.transfers is None else self.transfers.pool.num_slots

    @property
    def has_l3(self) -> bool:
        return self.transfers is not None and self.transfers.store is not None


def build_lower_tiers(
    config: EngineConfig,
    runner: ModelRunner,
    wake: Callable[[], None],
    *,
    l2_fd: int | None = None,
    store: Store | None = None,
) -> LowerTiers:
    """L2, and L3 where it is configured.

    Args:
        l2_fd: shared memory that outlives this process; None: L2 is this process's own.
        store: used as L3 instead of the configured one.

    Raises:
        ConfigError: the configured L2 does not hold one page.
    """
    if not isinstance(runner, HasKvPool):
        reason = "the model runner shows no pool"
        facts = TierFacts(device_kind="cpu", page_bytes=0, l2_reason=reason, l3_reason=reason)
        return LowerTiers(transfers=None, facts=facts)
    layout = runner.layout
    device = device_memory(runner.kv_pool, layout.page_bytes)
    shape = _pool_shape(config, layout, device.kind, l2_fd)
    if shape is None:
        facts = TierFacts(
            device_kind=device.kind,
            page_bytes=layout.page_bytes,
            l2_reason="engine.tiers.l2_bytes is 0",
            l3_reason="there is no L2",
        )
        return LowerTiers(transfers=None, facts=facts)
    keys = ObjectKeys(runner.model_fingerprint, layout)
    pool = HostPool(shape, layout, keys, l2_fd)
    if device.kind == "cuda":
        put_near_gpu(pool.region.address, pool.region.num_bytes, _pci_id(runner.kv_pool.device))
        pool.region.pin()
    if store is None:
        store = _open_store(config, layout)
    transfers = TransferEngine(device, pool, store, wake, checks_bodies=device.kind == "cpu")
    logger.info(
        "tiers: l2_pages=%d l2_mib=%d l2_shared=%s l3=%s",
        pool.num_slots,
        shape.num_bytes >> 20,
        pool.region.is_shared,
        store.kind if store is not None else "none",
    )
    facts = TierFacts(
        device_kind=device.kind,
        page_bytes=layout.page_bytes,
        l3_reason="" if store is not None else f"engine.tiers.l3 is {config.tiers.l3}",
    )
    return LowerTiers(transfers=transfers, facts=facts, num_layers=layout.num_layers)


def _pci_id(device: torch.device) -> str:
    """As the machine names a GPU: domain:bus:device.function; "" where torch does not say."""
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return ""
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _pool_shape(
    config: EngineConfig, layout: KvLayout, device_kind: str, l2_fd: int | None
) -> PoolShape | None:
    """How L2 is cut; None: there is none."""
    wanted = config.tiers.l2_bytes
    if wanted == 0:
        return None
    if wanted > 0:
        shape = shape_within(wanted, layout, most_slots=1 << 30)
        if shape.num_slots < 1:
            one = PoolShape(num_slots=1, page_bytes=layout.page_bytes, page_size=layout.page_size)
            raise ConfigError(
                "engine.tiers.l2_bytes", wanted, f"0, -1, or at least one page ({one.num_bytes})"
            )
        return shape
    if l2_fd is not None and (kept := kept_slots(l2_fd, layout)):
        # As large as it was: what is in it counts as used memory now.
        return PoolShape(num_slots=kept, page_bytes=layout.page_bytes, page_size=layout.page_size)
    budget = min(int(free_host_bytes() * AUTO_SHARE), MOST_AUTO_BYTES[device_kind])
    shape = shape_within(budget, layout, most_slots=MOST_SLOTS)
    return shape if shape.num_slots else None


def _open_store(config: EngineConfig, layout: KvLayout) -> Store | None:
    """The store of the configuration; one that cannot be reached is down, not an error."""
    tiers = config.tiers
    return open_store(
        StoreSpec(
            kind="none" if tiers.l3 == "auto" else tiers.l3,
            layout_fingerprint=layout.fingerprint(),
            object_bytes=object_bytes(layout.page_bytes),
            directory=tiers.l3_dir,
            quota_bytes=tiers.l3_quota_bytes,
            run_dir=config.run_dir,
        )
    )
