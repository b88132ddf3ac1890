"""Units measured in other processes than the command's: of this machine, or of a Ray cluster's."""
