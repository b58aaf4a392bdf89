"""Names in distributed checkpoints of PyTorch, and what to do with one that Treering does not read."""

NAME = "dcp"
METADATA = ".metadata"
CONVERT = (
    "convert it where PyTorch is, and open the new file: python -m torch.distributed.checkpoint.format_utils "
    "dcp_to_torch FOLDER model.pt"
)
