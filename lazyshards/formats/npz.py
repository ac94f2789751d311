"""NumPy's .npz archives: .npy arrays in a zip file, of which one is the shard.

A member that is stored as it is (``np.savez``) is read as plain bytes at its place in the archive. One that is
deflated (``np.savez_compressed``) is inflated from its beginning in bounded pieces, since deflate knows no other way.

The archive's directory is read by Python's ``zipfile``, and the header of a member by the npy format.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import cast

import numpy as np
import numpy.typing as npt

from lazyshards.formats.base import Fault
from lazyshards.formats.npy import NpyFormat
from lazyshards.formats.npz_inflate import Deflated, inflate_head, read_member
from lazyshards.formats.npz_members import Member, choose_member, locate_members, read_directories
from lazyshards.formats.options import check_options, name_option
from lazyshards.layout import Decoded, Packed, Planes, Shard
from lazyshards.selection import Cell
from lazyshards.storage.base import Head, Stamp, Storage

__all__ = ["NpzFormat"]

_SLACK_NBYTES = 512
"""Bytes that deflate may need more than it gives, at the beginning of a member: its tables."""


class NpzFormat:
    """One named array of each .npz archive.

    Availability: always. Options: ``member``, its name as NumPy has it (``arr_0``); found alone if every archive holds
    only one. Stored members are read as plain bytes; deflated ones are inflated from their beginning.
    """

    name = "npz"
    suffixes = (".npz",)
    magic: tuple[bytes, ...] = ()  # those of any zip file
    directories = False

    def inspect(self, paths: Sequence[str], storage: Storage, options: Mapping[str, object]) -> list[Shard | Fault]:
        """Return a shard, or what is wrong, for every archive."""
        check_options(options, self.name, ("member",))
        wanted = name_option(options, "member")
        heads = storage.heads(paths, 4)
        chosen = [
            item if isinstance(item, Fault) else choose_member(path, item, wanted)
            for path, item in zip(paths, read_directories(paths, heads, storage), strict=True)
        ]
        found = locate_members(paths, heads, chosen, storage)
        members = {path: item for path, item in zip(paths, found, strict=True) if isinstance(item, Member)}
        stamps = {path: head.stamp for path, head in zip(paths, heads, strict=True)}
        arrays = NpyFormat().inspect(list(members), cast("Storage", _Members(storage, members, stamps)), {})
        described = {
            path: _shard(members[path], stamps[path], array) for path, array in zip(members, arrays, strict=True)
        }
        return [item if isinstance(item, Fault) else described[path] for path, item in zip(paths, found, strict=True)]

    def read_into(self, shard: Shard, start: int, out: npt.NDArray[np.generic], cell: Cell, storage: Storage) -> None:
        """Inflate a deflated member from its beginning, or from where a read before this ended, to the rows wanted."""
        assert isinstance(shard.source, Decoded)
        detail = shard.source.detail
        assert isinstance(detail, Deflated)
        read_member(shard, detail, start, out, cell, storage)


class _Members:
    """The members of archives as if each were a file of its own, for the npy format to inspect."""

    def __init__(self, storage: Storage, members: Mapping[str, Member], stamps: Mapping[str, Stamp]) -> None:
        self._storage = storage
        self._members = members
        self._stamps = stamps

    def heads(self, paths: Sequence[str], nbytes: int) -> list[Head]:
        found = self.fetch([(path, 0, min(nbytes, self._members[path].nbytes)) for path in paths])
        return [Head(data, Stamp(self._members[path].nbytes)) for path, data in zip(paths, found, strict=True)]

    def fetch(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        found = []
        inner = []
        for path, offset, nbytes in ranges:
            member = self._members[path]
            if member.is_deflated:
                stored = min(member.stored_nbytes, offset + nbytes + _SLACK_NBYTES)
                inner.append((path, member.offset, stored))
            else:
                inner.append((path, member.offset + offset, min(nbytes, member.nbytes - offset)))
        for (path, offset, nbytes), data in zip(ranges, self._storage.fetch(inner), strict=True):
            found.append(inflate_head(data, offset, nbytes) if self._members[path].is_deflated else data)
        return found


def _shard(member: Member, stamp: Stamp, array: Shard | Fault) -> Shard | Fault:
    """Return the shard that a member is, given what it would be as a file of its own."""
    if isinstance(array, Fault):
        return Fault(array.path, f"holds an array {member.name!r} that {array.found}")
    source = array.source
    assert isinstance(source, Packed | Planes)
    start = source.offset if isinstance(source, Packed) else source.start
    nbytes = prod(array.row_shape) * array.rows * array.dtype.itemsize
    if member.is_deflated:
        if start + nbytes != member.nbytes:
            return Fault(
                array.path,
                f"holds an array {member.name!r} of {start + nbytes:,} bytes in {member.nbytes:,} that are deflated",
            )
        detail = Deflated(member, start, isinstance(source, Planes))
        return array._replace(stamp=stamp, source=Decoded(detail, (0,)))
    if isinstance(source, Packed):
        return array._replace(stamp=stamp, source=Packed(member.offset + source.offset))
    return array._replace(stamp=stamp, source=Planes(member.offset + source.start, source.stride))
