// The API key, where the gateway asks for one: in this tab's session storage and nowhere else.

const NAME = "biphase-api-key";

function read() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

let value = read();

export const key = {
  get isSet() {
    return value !== "";
  },
  set(given) {
    value = given.trim();
    try {
      if (value) sessionStorage.setItem(NAME, value);
      else sessionStorage.removeItem(NAME);
    } catch {
      // Without storage it lasts until the page is loaded again.
    }
  },
  headers() {
    return value ? { Authorization: `Bearer ${value}` } : {};
  },
};
