"""A dump in the containers of other tools: HDF5, npz, safetensors, msprobe's folders."""
