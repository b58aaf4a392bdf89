"""Defines the basic parts of a checkpoint that all other modules use: paths, boxes, entries, trees and views."""
