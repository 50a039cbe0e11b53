"""A mypy plugin: the builtin `sum` adds integers and objects of other libraries, `planner.sums.float_sum` adds floats.

Since Python 3.12 `sum` carries what rounding loses of floats along. Its result then depends on the version of
Python, and with it which of two plans that are almost equal comes first. What is typed `Any` may be a float and is
refused, too.
`make check` runs it; `tests/test_float_sums.py` refuses `sum` where it is passed on instead of called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mypy.errorcodes import ErrorCode
from mypy.maptype import map_instance_to_supertype
from mypy.plugin import FunctionSigContext, Plugin
from mypy.types import (
    AnyType,
    FunctionLike,
    Instance,
    LiteralType,
    TupleType,
    Type,
    TypeVarType,
    UnionType,
    get_proper_type,
)

FLOAT_SUM = ErrorCode("float-sum", "The builtin sum of floats depends on the version of Python", "shardplan")


def _may_be_float(of: Type) -> bool:
    """True if values of a type may be floats: floats and what derives from them, unions with them, and `Any`."""
    proper = get_proper_type(of)
    if isinstance(proper, UnionType):
        return any(map(_may_be_float, proper.items))
    if isinstance(proper, LiteralType):
        return _may_be_float(proper.fallback)
    if isinstance(proper, Instance):
        names = [base.fullname for base in proper.type.mro]
        return names[0] == "builtins.object" or "builtins.float" in names or "builtins.complex" in names
    if isinstance(proper, TypeVarType):
        return _may_be_float(proper.upper_bound)
    return isinstance(proper, AnyType)


def _item_types(of: Type, context: FunctionSigContext) -> Iterator[Type]:
    """Types of what an iterable yields, several of a tuple or a union; `Any` or a type variable stands for itself."""
    proper = get_proper_type(of)
    if isinstance(proper, TupleType):
        yield from proper.items
    elif isinstance(proper, UnionType):
        for item in proper.items:
            yield from _item_types(item, context)
    elif isinstance(proper, Instance) and proper.type.has_base("typing.Iterable"):
        iterable = context.api.named_generic_type("typing.Iterable", [proper])
        yield map_instance_to_supertype(proper, iterable.type).args[0]
    else:
        yield proper


def _refuse_floats(context: FunctionSigContext) -> FunctionLike:
    iterables, *starts = context.args
    added = [item for one in iterables for item in _item_types(context.api.get_expression_type(one), context)]
    added += [context.api.get_expression_type(start) for given in starts for start in given]
    if any(map(_may_be_float, added)):
        found = '" and "'.join(sorted({str(one) for one in added if _may_be_float(one)}))
        context.api.fail(
            f'The builtin sum adds "{found}" otherwise since Python 3.12: planner.sums.float_sum adds floats',
            context.context,
            code=FLOAT_SUM,
        )
    return context.default_signature


class FloatSums(Plugin):
    """Looks at every call of the builtin `sum`."""

    def get_function_signature_hook(self, fullname: str) -> Callable[[FunctionSigContext], FunctionLike] | None:
        """Return the check for `sum`, nothing for any other function."""
        return _refuse_floats if fullname == "builtins.sum" else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin; mypy calls this with its own version."""
    return FloatSums
