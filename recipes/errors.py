"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A mistake of the user's; its message says what to do. The command line ends with status 2."""
