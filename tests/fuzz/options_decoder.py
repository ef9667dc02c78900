"""What SGLang hands over as extra config, as one more decoder: refused at attach, or usable."""

from __future__ import annotations

import json
import math

from tutti_core.trials.decoders import Decoder
from tutti_sglang.options import parse_options

SAMPLES = (
    b'{"path": "/nowhere", "capacity": "2GiB", "tenant": "t", "operation_timeout_s": 3}',
    b'{"backend_name": "tutti", "module_path": "m", "class_name": "C", "interface_v1": true,'
    b' "file_storage_path": "/x", "capacity": 2147483648, "weights": "w"}',
    b'{"capacity": "1GiB", "path": "/p", "tutti_prefix_keys": true, "tutti_rank_drafts": false}',
)


def decode_options(data: bytes) -> None:
    """The JSON text of an extra config; what is not JSON never gets here, SGLang refuses it."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    options = parse_options(given, writers=2)
    options.store.check()
    assert math.isfinite(options.operation_timeout_s) and options.operation_timeout_s > 0
    assert isinstance(options.tenant, str) and options.tenant.encode() is not None
    assert options.weights is None or options.weights.encode() is not None
    for name in ("passes_prefix_keys", "backs_up_drafts", "zero_copy"):
        assert isinstance(getattr(options, name), bool)


OPTIONS = Decoder("options", SAMPLES, decode_options, text=True)
