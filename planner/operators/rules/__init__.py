"""What operators are, one file a family; a module registers its operators when it is imported."""
