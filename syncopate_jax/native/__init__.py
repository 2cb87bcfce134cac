"""Native code: one C++ file of XLA FFI handlers, built at first use where a compiler is found."""
