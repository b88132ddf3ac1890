"""The command lines of the documents that the product was asked for with, one module a document."""
