"""Plain things that everything else is made of: names, boxes, catalogues, views."""
