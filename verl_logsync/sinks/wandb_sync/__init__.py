"""The W&B sink: fragments go out by the official uploader, answers come back by GraphQL.

Nothing is imported here: the uploader's process starts from this package and must be light.
"""
