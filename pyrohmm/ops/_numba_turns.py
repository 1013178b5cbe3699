"""Blocks of four by four numbers, transposed in registers: rows of sequences become lanes.

Rows of four numbers each lie anywhere in one array; in a tile, entry j of lane i lies ``stride``
times j further than that of the lane's first.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

_PAIRS, _QUADS = ([0, 4, 1, 5], [2, 6, 3, 7]), ([0, 1, 4, 5], [2, 3, 6, 7])


def _pointers(context, builder, kind, array, offsets):
    """Where four numbers begin, for each offset."""
    data = cgutils.create_struct_proxy(kind)(context, builder, value=array).data
    four = ir.VectorType(context.get_data_type(kind.dtype), 4).as_pointer()
    return [builder.bitcast(builder.gep(data, [offset]), four) for offset in offsets]


def _lanes(builder, at, stride):
    """Offsets of four rows of a tile."""
    offsets = [at]
    for _ in range(3):
        offsets.append(builder.add(offsets[-1], stride))
    return offsets


def _read(builder, kind, pointers):
    loads = [builder.load(pointer) for pointer in pointers]
    for load in loads:
        load.align = kind.dtype.bitwidth // 8  # a row may begin anywhere
    return loads


def _write(builder, kind, vectors, pointers):
    for vector, pointer in zip(vectors, pointers):
        builder.store(vector, pointer, align=kind.dtype.bitwidth // 8)


def _transposed(builder, rows):
    def mixed(first, second, order):
        indices = [ir.Constant(ir.IntType(32), i) for i in order]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), 4), indices)
        return builder.shuffle_vector(first, second, mask)

    a, b, c, d = rows
    pairs = [(mixed(a, b, order), mixed(c, d, order)) for order in _PAIRS]
    return [mixed(*pair, order) for pair in pairs for order in _QUADS]


def _refuse_strides(*arrays):
    """Numbers lie one after the other: an array with strides would be read beyond its end."""
    if any(array.layout != "C" for array in arrays):
        raise TypingError("blocks are of contiguous arrays")


@intrinsic
def load_block(_, tile, at, stride, array, a, b, c, d):
    """Write four numbers each, from ``a``, ``b``, ``c`` and ``d`` on, to four lanes of a tile."""
    _refuse_strides(tile, array)

    def generate(context, builder, signature, arguments):
        tile, at, stride, array, *rows = arguments
        into, source = signature.args[0], signature.args[3]
        found = _read(builder, source, _pointers(context, builder, source, array, rows))
        lanes = _pointers(context, builder, into, tile, _lanes(builder, at, stride))
        _write(builder, into, _transposed(builder, found), lanes)
        return context.get_dummy_value()

    return types.void(tile, at, stride, array, a, b, c, d), generate


def _out(add):
    def typed(_, array, a, b, c, d, tile, at, stride):
        _refuse_strides(array, tile)

        def generate(context, builder, signature, arguments):
            array, *rows, tile, at, stride = arguments
            into, source = signature.args[0], signature.args[5]
            lanes = _pointers(context, builder, source, tile, _lanes(builder, at, stride))
            found = _transposed(builder, _read(builder, source, lanes))
            if into.dtype != source.dtype:  # float64 for float32
                wide = ir.VectorType(context.get_data_type(into.dtype), 4)
                found = [builder.fpext(vector, wide) for vector in found]
            pointers = _pointers(context, builder, into, array, rows)
            for vector, pointer in zip(found, pointers):  # in order: rows may be the same
                if add:
                    (before,) = _read(builder, into, [pointer])
                    vector = builder.fadd(before, vector)
                _write(builder, into, [vector], [pointer])
            return context.get_dummy_value()

        return types.void(array, a, b, c, d, tile, at, stride), generate

    return typed


store_block = intrinsic(_out(add=False))  # the other way
add_block = intrinsic(_out(add=True))  # adds to what is there, which may be in float64
