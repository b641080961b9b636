"""What the kernels tell race detection about ops whose values decide what they access, derived from the schemas of torch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

accesses: Any = sys.modules.get("_accelerator_simulation._inside.ops.accesses")
INDICES = ("index", "indices", "mask")


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def ops_in_place_by_index() -> list[str]:
    """Return the ops that write their first tensor in place, at places that another tensor holds."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::") and schema.arguments]
    return sorted(
        {
            schema.name
            for schema in schemas
            if is_written(schema.arguments[0])
            and any(each.name in INDICES and "Tensor" in str(each.type) and not is_written(each) for each in schema.arguments)
        }
    )


@pytest.mark.parametrize("name", ops_in_place_by_index())
def test_ops_in_place_by_index_write_a_part(name: str) -> None:
    assert accesses.flags_of(name) & accesses._USES_PART


def test_there_are_such_ops() -> None:
    assert {"aten::index_put_", "aten::scatter_reduce_", "aten::masked_fill_"} <= set(ops_in_place_by_index())
