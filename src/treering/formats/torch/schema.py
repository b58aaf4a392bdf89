"""Names in the files of PyTorch, and what to do with a file that Treering does not read."""

NAME = "torch"
PICKLE = "/data.pkl"  # ends the name of the pickle in an archive
CHUNKS = ".distcp"  # ends the names of files that have one archive after another
RESAVE = (
    "save it again where PyTorch is, and open the new file: torch.save(torch.load(path, weights_only=True), 'model.pt')"
)
SAVE_STATE = (
    "if you trust it, save its tensors where that program is, and open the new file: "
    "torch.save(torch.load(path, weights_only=False).state_dict(), 'model.pt')"
)
SAVE_SCRIPT = (
    "where PyTorch is, save its tensors, and open the new file: "
    "torch.save(torch.jit.load(path).state_dict(), 'model.pt')"
)
RENAME_KEY = "rename it where PyTorch is, save the dict again by torch.save, and open the new file"
