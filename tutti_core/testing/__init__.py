"""Public tools for tests of stores and transports: devices with faults, an oracle, a checker.

FaultyDevices     a transport over memory that fails on command; `faults` has the table
Media             the bytes under it, with power loss
Oracle            what a prefix store may answer; `page_bytes` and `explain` name bytes
CHECKS            the conformance suite for transports; `check_transport` runs all of it
Arena, make_batch guarded memory and batches from it
soft_nvme.SoftNvme  an NVMe controller in software; a module of its own, as it needs the native part
"""

from tutti_core.testing.batches import Arena, Item, make_batch
from tutti_core.testing.conformance import (
    CHECKS,
    CheckSkipped,
    ConformanceError,
    Subject,
    check_transport,
)
from tutti_core.testing.faults import FOREVER, Fault, FaultPlan, FaultyDevices
from tutti_core.testing.media import Media
from tutti_core.testing.oracle import Oracle, explain, page_bytes

__all__ = [
    "CHECKS",
    "FOREVER",
    "Arena",
    "CheckSkipped",
    "ConformanceError",
    "Fault",
    "FaultPlan",
    "FaultyDevices",
    "Item",
    "Media",
    "Oracle",
    "Subject",
    "check_transport",
    "explain",
    "make_batch",
    "page_bytes",
]
