"""Reads weights of Keras (.weights.h5, .weights.json, .keras) and other HDF5 files, without h5py."""
