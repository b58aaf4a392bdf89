"""safetensors: files and folders of them."""
