"""Layouts, copies and digests of tensors, and what the state of a training consists of."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.transfer.boxes import CHUNK_BYTES as CHUNK_BYTES
    from argosy.transfer.boxes import Box as Box
    from argosy.transfer.boxes import cut as cut
    from argosy.transfer.boxes import flat_boxes as flat_boxes
    from argosy.transfer.boxes import strides_of as strides_of
    from argosy.transfer.boxes import whole as whole
    from argosy.transfer.copying import ZERO as ZERO
    from argosy.transfer.copying import Copy as Copy
    from argosy.transfer.copying import Progress as Progress
    from argosy.transfer.copying import Spot as Spot
    from argosy.transfer.copying import Sums as Sums
    from argosy.transfer.copying import Table as Table
    from argosy.transfer.copying import add as add
    from argosy.transfer.copying import copy_boxes as copy_boxes
    from argosy.transfer.copying import finish as finish
    from argosy.transfer.copying import rows_of as rows_of
    from argosy.transfer.copying import spot as spot
    from argosy.transfer.copying import spot_in as spot_in
    from argosy.transfer.copying import table_of as table_of
    from argosy.transfer.devices import DeviceFailed as DeviceFailed
    from argosy.transfer.devices import HostCopies as HostCopies
    from argosy.transfer.devices import PinnedMemory as PinnedMemory
    from argosy.transfer.devices import device_of as device_of
    from argosy.transfer.devices import is_device_error as is_device_error
    from argosy.transfer.devices import pinned as pinned
    from argosy.transfer.devices import seed_devices as seed_devices
    from argosy.transfer.devices import synchronize as synchronize
    from argosy.transfer.devices import synchronize_stream as synchronize_stream
    from argosy.transfer.devices import to_host as to_host
    from argosy.transfer.layout import Layout as Layout
    from argosy.transfer.layout import Piece as Piece
    from argosy.transfer.layout import Placement as Placement
    from argosy.transfer.layout import Range as Range
    from argosy.transfer.layout import Split as Split
    from argosy.transfer.layout import blocked as blocked
    from argosy.transfer.layout import flat as flat
    from argosy.transfer.layout import flat_buffer as flat_buffer
    from argosy.transfer.layout import replicated as replicated
    from argosy.transfer.layout import sharded as sharded
    from argosy.transfer.torch_copies import copy_of as copy_of
    from argosy.transfer.torch_copies import take_over as take_over
    from argosy.transfer.torch_extra import extras_of as extras_of
    from argosy.transfer.torch_inner import is_zero as is_zero
    from argosy.transfer.torch_ownership import Declared as Declared
    from argosy.transfer.torch_ownership import Ownership as Ownership
    from argosy.transfer.torch_ownership import find_owned as find_owned
    from argosy.transfer.torch_state import clean as clean
    from argosy.transfer.torch_state import describe as describe
    from argosy.transfer.torch_state import layout_of as layout_of
    from argosy.transfer.torch_state import tensors_state as tensors_state
    from argosy.transfer.torch_state import torch_dtypes as torch_dtypes
    from argosy.transfer.torch_state import unwrapped as unwrapped
    from argosy.transfer.torch_values import is_value as is_value
    from argosy.transfer.torch_values import value_of as value_of
    from argosy.transfer.trees import grown as grown
    from argosy.transfer.trees import holds_values as holds_values
    from argosy.transfer.trees import references as references
    from argosy.transfer.trees import referring as referring
    from argosy.transfer.units import DTYPES as DTYPES
    from argosy.transfer.units import WRAPPED_NOTE as WRAPPED_NOTE
    from argosy.transfer.units import Adoption as Adoption
    from argosy.transfer.units import Kind as Kind
    from argosy.transfer.units import Member as Member
    from argosy.transfer.units import Role as Role
    from argosy.transfer.units import State as State
    from argosy.transfer.units import Unit as Unit
    from argosy.transfer.units import Value as Value
    from argosy.transfer.units import checked_roles as checked_roles
    from argosy.transfer.units import flat_members as flat_members
    from argosy.transfer.units import full_name as full_name
    from argosy.transfer.units import held as held
    from argosy.transfer.units import is_plain as is_plain
    from argosy.transfer.units import role_of as role_of
    from argosy.transfer.units import why_fixed as why_fixed

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
