"""Writes the groups in this folder with zarr-python, which leaves out chunks of the fill value. Tests do not run it."""

import pathlib
import shutil

import numpy as np
import zarr

HERE = pathlib.Path(__file__).parent

if __name__ == "__main__":
    for version in (2, 3):
        shutil.rmtree(HERE / f"v{version}", ignore_errors=True)
        group = zarr.open_group(HERE / f"v{version}", mode="w", zarr_format=version)
        group.attrs["note"] = "by zarr-python"
        weight = group.create_array("params/w", shape=(4, 4), chunks=(2, 2), dtype="f4")
        weight[:2] = np.arange(8).reshape(2, 4)
        group.create_array("params/b", shape=(3,), dtype="i8", fill_value=7)
        group.create_array("nan", shape=(2,), dtype="f8", fill_value=np.nan)
        half = group.create_array(
            "half", shape=(8,), chunks=(2,), dtype="f2", **({"shards": (4,)} if version == 3 else {})
        )
        half[0] = 5
    shutil.rmtree(HERE / "array", ignore_errors=True)
    zarr.save_array(HERE / "array", np.arange(3), zarr_format=3)
