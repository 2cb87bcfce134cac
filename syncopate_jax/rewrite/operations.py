"""Names of the operations that may stand between a collective and a dot."""

from __future__ import annotations

UNARY = frozenset(
    {"abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "ceil", "copy", "cos"}
    | {"cosh", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "log"}
    | {"log1p", "logistic", "neg", "one_minus_square", "reduce_precision", "round", "rsqrt"}
    | {"sign", "sin", "sinh", "sqrt", "square", "tan", "tanh"}
)
BINARY = frozenset({"add", "atan2", "div", "max", "min", "mul", "pow", "rem", "sub"})
RESHAPES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
CASTS = frozenset({"pcast", "pvary"})
LINEAR = frozenset({"copy", "neg"})
ELEMENTWISE = (
    UNARY
    | BINARY
    | {"add_any", "and", "clamp", "convert_element_type", "eq", "ge", "gt", "is_finite"}
    | {"le", "lt", "ne", "nextafter", "not", "or", "select_n", "xor"}
)
ONE_TO_ONE = RESHAPES | CASTS | {"convert_element_type", "transpose"}
"""What casts, reshapes or transposes one value."""
