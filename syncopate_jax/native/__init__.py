"""Native code: XLA FFI handlers in C++, built at first use where a compiler is found."""
