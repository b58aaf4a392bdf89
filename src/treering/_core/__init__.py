"""The plain things that everything else is made of: names, boxes, entries, views."""
