"""Evidence bundles: one file that holds a kernel's evidence, that shows any change of a byte, and from which
compilation, verification, audit and, on a GPU, timing are repeated."""
