"""The CUDA text of the kernels, as package data; a package so that editable installs find it."""
