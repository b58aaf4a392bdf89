"""Makes and checks what a release consists of; CONTRIBUTING.md says when."""
