// Redoc draws its maker's logo from another host, which the policy of these pages blocks. The picture is left without an
// address, so that nothing is asked for and nothing is reported; Redoc has no setting for it.

const source = Object.getOwnPropertyDescriptor(HTMLImageElement.prototype, "src");
const setAttribute = HTMLImageElement.prototype.setAttribute;

function isOurs(address) {
  return ["data:", "blob:"].some((scheme) => String(address).startsWith(scheme)) || new URL(address, location.href).origin === location.origin;
}

Object.defineProperty(HTMLImageElement.prototype, "src", {
  ...source,
  set(address) { if (isOurs(address)) source.set.call(this, address); },
});
HTMLImageElement.prototype.setAttribute = function (name, value) {
  if (name !== "src" || isOurs(value)) setAttribute.call(this, name, value);
};
